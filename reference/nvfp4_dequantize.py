"""`nvfp4_dequantize`: NVFP4 or MXFP4 back to 16 or 32 bits, bit by bit.

    x = dtype((e2m1 * scale) * global_scale)        without the last factor for MXFP4

in float32, each step rounded to nearest even; e2m1 * scale is exact. The scales' element type says
which format it is: float8_e4m3fn or float8_e8m0fnu. Scales may be any, subnormal E4M3 among them;
one that is NaN makes its block NaN (bits of a NaN: 0x7FFF in bfloat16 and float16, 0x7FFFFFFF in
float32). What is beyond the type's range becomes infinite. E4M3's sign counts, as of any factor.
global_scale must lie within 2^-64 and 2^64.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Derived, Entry, Peer, Problem, Tensor
from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import (
    CODES,
    FORMATS,
    LAYOUTS,
    SCALE,
    block_of,
    dequantize,
    linear,
    scale_sizes,
    swizzle,
)
from kernelcat.reference._nvfp4_peers import torch_dequantize

DTYPES = ("bfloat16", "float16", "float32")
NAN = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}
HALF_K = Derived("K/2", lambda axes: axes["K"] // 2, tells=("K", lambda size, axes: 2 * size))


def _stored(values, dtype: str):
    """Storage of float32 ``values``, one NaN for all."""
    from numpy import errstate

    xp = library_of(values)
    missing = xp.isnan(values)
    with errstate(over="ignore"):
        found = dtypes.encode(xp.where(missing, xp.float32(0), values), dtype)
    bits = found.view(f"uint{8 * found.dtype.itemsize}")
    return xp.where(missing, NAN[dtype], bits).astype(bits.dtype).view(found.dtype)


def _oracle(problem, arrays):
    scales = linear(problem.values, arrays["scale"], problem["M"])
    values = dequantize(arrays["q"], scales, problem["format"], arrays.get("global_scale"))
    return {"x": _stored(values, problem["dtype"])}


def _make_inputs(problem, normal):
    """Every code and, over enough blocks, every scale that is not negative, NaN among them.

    The padding of swizzled scales, which nobody needs, is NaN.
    """
    m, k = problem["M"], problem["K"]
    blocks = (m, k // block_of(problem.values))
    xp = library_of(normal((1,)))
    values = 3 * normal((m, k))
    scales = xp.abs(normal(blocks) * 60)
    if problem["format"] == "nvfp4":
        codes = scales.astype("uint8") % 128
        inputs = {"global_scale": xp.exp(2 * normal((1,)))}
    else:
        # The lowest two make float32 subnormals, which CuPy's kernels flush.
        codes, inputs = (127 + normal(blocks) * 40).clip(2, 255).astype("uint8"), {}
    nan = 0x7F if problem["format"] == "nvfp4" else 0xFF
    if problem["scale_layout"] == "swizzled":
        codes = swizzle(codes, fill=nan)
    return inputs | {"q": values, "scale": dtypes.decode(codes, SCALE.where(problem.values))}


def _bytes_moved(problem: Problem) -> int:
    elements = problem["M"] * problem["K"]
    packed = elements // 2 + elements // block_of(problem.values)
    return int(packed + elements * dtypes.itemsize(problem["dtype"]))


def _constraint(problem: Problem) -> str | None:
    if problem["K"] % block_of(problem.values):
        return f"blocks of {problem['format']} are {block_of(problem.values)} elements long"
    return None


def _problem(m: int, k: int, format: str, scale_layout: str = "linear") -> Problem:
    return Problem.of(
        "nvfp4_dequantize", M=m, K=k, dtype="bfloat16", format=format, scale_layout=scale_layout
    )


SHAPES = ((128, 7168), (4096, 4096), (7168, 18432), (5760, 2880))
"""Activations, and weights of DeepSeek-V3 and gpt-oss."""


def _names() -> dict[str, Problem]:
    names = {f"{m}x{k}-{f}": _problem(m, k, f) for f in FORMATS for m, k in SHAPES}
    return names | {"7168x18432-nvfp4-swizzled": _problem(7168, 18432, "nvfp4", "swizzled")}


ENTRY = Entry(
    name="nvfp4_dequantize",
    summary="NVFP4 or MXFP4 with linear or swizzled scales back to 16 or 32 bits, bit-exact.",
    axes=(
        Axis.size("M", "rows", 0, 300),
        Axis.size("K", "columns, a multiple of the format's block", 0, 1024, step=16),
        Axis.choice("dtype", "element type of x", *DTYPES, default="bfloat16", minor=True),
        Axis.choice("format", "told by the scales' element type", *FORMATS),
        Axis.choice("scale_layout", "order of the scales", *LAYOUTS, default="linear"),
    ),
    inputs=(
        Tensor("q", ("M", HALF_K), CODES, "pairs of values, the first in the low half"),
        Tensor("scale", scale_sizes("M"), SCALE, "of 16 (nvfp4) or 32 (mxfp4) of a row"),
        Tensor(
            "global_scale", (1,), "float32", "what all values are multiplied by",
            flag="format", when="nvfp4",
        ),
    ),
    outputs=(Tensor("x", ("M", "K"), "dtype", "the values"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: problem["M"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(Peer("torch", torch_dequantize),),
    constraint=_constraint,
)  # fmt: skip
