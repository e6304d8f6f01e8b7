"""`nvfp4_dequantize`: NVFP4 or MXFP4 (`_fp4`) back to 16 or 32 bits, bit-exact.

    x = dtype((e2m1 * scale) * global_scale)        without the last factor for MXFP4

in float32, each step rounded to nearest even; e2m1 * scale is exact. The element type of the scales
decides the format: float8_e4m3fn is NVFP4, float8_e8m0fnu is MXFP4.

Any scale is valid, subnormal and negative E4M3 included. A NaN scale makes its block NaN, with the
bits 0x7FFF in bfloat16 and float16 and 0x7FFFFFFF in float32. Results beyond the type's range
become infinite. global_scale must lie between 2^-64 and 2^64.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Peer, Problem, Tensor
from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import (
    CODES,
    CODES_DOC,
    FORMATS,
    LAYOUT_DOC,
    LAYOUTS,
    NAN_SCALE,
    PACKED_K,
    SCALE,
    SCALE_DOC,
    block_error,
    block_of,
    dequantize,
    from_layout,
    scale_sizes,
    swizzle,
)
from kernelcat.reference._nvfp4_peers import torch_dequantize

DTYPES = ("bfloat16", "float16", "float32")
NAN = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}
"""Bits of the NaN that results hold."""


def _storage(values, dtype: str):
    """Storage of float32 ``values`` in ``dtype``, with :data:`NAN` for every NaN."""
    xp = library_of(values)
    is_nan = xp.isnan(values)
    stored = dtypes.encode(xp.where(is_nan, xp.float32(0), values), dtype)
    bits = stored.view(f"uint{8 * stored.dtype.itemsize}")
    return xp.where(is_nan, NAN[dtype], bits).astype(bits.dtype).view(stored.dtype)


def _oracle(problem, arrays):
    from numpy import errstate

    scales = from_layout(problem.values, arrays["scale"], problem["M"])
    with errstate(over="ignore"):  # results beyond the type's range become infinite
        values = dequantize(arrays["q"], scales, problem["format"], arrays.get("global_scale"))
        return {"x": _storage(values, problem["dtype"])}


def _make_inputs(problem, normal):
    """All codes and, over enough blocks, all scales that are not negative, NaN included.

    The padding of swizzled scales, which no result depends on, is NaN.
    """
    m, k, format = problem["M"], problem["K"], problem["format"]
    blocks = (m, k // block_of(problem.values))
    xp = library_of(normal((1,)))
    values = 3 * normal((m, k))
    scales = xp.abs(normal(blocks) * 60)
    if format == "nvfp4":
        codes = scales.astype("uint8") % 128
        inputs = {"global_scale": xp.exp(2 * normal((1,)))}
    else:
        # Codes 0 and 1 make float32 subnormals, which CuPy's kernels flush to zero.
        codes, inputs = (127 + normal(blocks) * 40).clip(2, 255).astype("uint8"), {}
    if problem["scale_layout"] == "swizzled":
        codes = swizzle(codes, fill=NAN_SCALE[format])
    return inputs | {"q": values, "scale": dtypes.decode(codes, SCALE.where(problem.values))}


def _bytes_moved(problem: Problem) -> int:
    elements = problem["M"] * problem["K"]
    packed = elements // 2 + elements // block_of(problem.values)
    return int(packed + elements * dtypes.itemsize(problem["dtype"]))


def _problem(m: int, k: int, format: str, scale_layout: str = "linear") -> Problem:
    return Problem.of(
        "nvfp4_dequantize", M=m, K=k, dtype="bfloat16", format=format, scale_layout=scale_layout
    )


SHAPES = ((128, 7168), (4096, 4096), (7168, 18432), (5760, 2880))
"""M and K: activations, and weights of DeepSeek-V3 and gpt-oss."""


def _problems() -> dict[str, Problem]:
    problems = {f"{m}x{k}-{f}": _problem(m, k, f) for f in FORMATS for m, k in SHAPES}
    return problems | {"7168x18432-nvfp4-swizzled": _problem(7168, 18432, "nvfp4", "swizzled")}


ENTRY = Entry(
    name="nvfp4_dequantize",
    summary="NVFP4 or MXFP4 with linear or swizzled scales back to 16 or 32 bits, bit-exact.",
    axes=(
        Axis.size("M", "rows of x", 0, 300, varies=True),
        Axis.size(
            "K", "columns of x, a multiple of 16 (nvfp4) or 32 (mxfp4)", 0, 1024, step=16
        ),
        Axis.choice("dtype", "element type of x", *DTYPES, default="bfloat16", minor=True),
        Axis.choice("format", "follows from the element type of scale", *FORMATS),
        Axis.choice("scale_layout", LAYOUT_DOC, *LAYOUTS, default="linear"),
    ),
    inputs=(
        Tensor("q", ("M", PACKED_K), CODES, CODES_DOC),
        Tensor("scale", scale_sizes("M"), SCALE, SCALE_DOC),
        Tensor(
            "global_scale", (1,), "float32", "NVFP4: factor of all values, 2^-64 to 2^64",
            flag="format", when="nvfp4",
        ),
    ),
    outputs=(Tensor("x", ("M", "K"), "dtype", "e2m1 * scale * global_scale"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["M"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_problems(),
    peers=(Peer("torch", torch_dequantize),),
    without_peer={
        "*-swizzled": "torch's definition has linear scales only",
    },
    constraint=block_error,
)  # fmt: skip
