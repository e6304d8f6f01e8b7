"""`nvfp4_matmul`: D = activation(global_scale * (A @ W^T) + bias) with weights in NVFP4 or MXFP4.

W is (N, K), ``w = e2m1 * scale`` with one scale for 16 (NVFP4) or 32 (MXFP4) of a row; the scales'
element type says which. A is bfloat16 or float16 (W4A16), and weights are rounded to that type
before they are multiplied: NVFP4's fit exactly, MXFP4's fit bfloat16 exactly. Or A is float8_e4m3fn
with a float32 scale a row (W4A8), ``a = e4m3 * a_scale``, and D bfloat16. Sums are float32;
``global_scale``, float32 of (1,), is NVFP4's: what products are multiplied by (`_fp4`). bias,
activations and swiglu's halved columns are those of `gemm`.

``packing`` is how weights lie: ``rows``, as `nvfp4_quantize` and checkpoints have them, or
``tiles``, as `kernelcat.fp4.prepack` makes of those once (reference/_fp4_tiles.py has the order).

Scales must be neither negative nor NaN; zeros and subnormals count as they are.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.reference._fp4 import BLOCKS, CODES, FORMATS, SCALE, block_of
from kernelcat.reference._fp4_tiles import (
    CODE_BYTES,
    TILE_COLS,
    TILE_ROWS,
    pack_codes,
    pack_scales,
    padded,
    unpack_codes,
    unpack_scales,
)
from kernelcat.reference._nvfp4_peers import torch_matmul
from kernelcat.reference.gemm import ACTIVATIONS, OUT_COLS, activate, out_cols
from kernelcat.reference.paged_attn import library_of
from kernelcat.spec import Axis, Derived, ElementType, Entry, Peer, Problem, Tensor, Tolerance

FP8 = "float8_e4m3fn"
DTYPES = ("bfloat16", "float16", FP8)
PACKINGS = ("rows", "tiles")
OUT = ElementType.of("dtype", bfloat16="bfloat16", float16="float16", float8_e4m3fn="bfloat16")


def _sizes(axes):
    """Rows of W, bytes of codes and scales of each, as they are stored."""
    n, k, size = axes["N"], axes["K"], block_of(axes)
    if axes["packing"] == "rows":
        return n, k // 2, k // size
    tiles = padded(k, TILE_COLS) // TILE_COLS
    return padded(n, TILE_ROWS), tiles * CODE_BYTES, tiles * (TILE_COLS // size)


W_ROWS = Derived("N, in tiles of 16", lambda axes: _sizes(axes)[0])
W_BYTES = Derived("K/2, in tiles of 32", lambda axes: _sizes(axes)[1])
W_SCALES = Derived("K/16 (nvfp4) or K/32 (mxfp4), in tiles of 64", lambda axes: _sizes(axes)[2])


def weights(problem, codes, scales):
    """Float32 (N, K) of stored bytes, without the global scale."""
    n, k, format = problem["N"], problem["K"], problem["format"]
    if problem["packing"] == "tiles":
        codes, scales = unpack_codes(codes, n, k), unpack_scales(scales, format, n, k)
    scale = dtypes.decode(scales, SCALE.where(problem.values))
    return dtypes.decode(codes, CODES) * scale.repeat(BLOCKS[format], axis=1)


def _oracle(problem, arrays):
    """Decoded tensors in, packed ones among them: their bytes are made anew."""
    from numpy import errstate

    codes = dtypes.encode(arrays["w"], CODES)
    scales = dtypes.encode(arrays["w_scale"], SCALE.where(problem.values))
    w = weights(problem, codes, scales)
    if problem["dtype"] == "float16":
        with errstate(over="ignore"):
            w = dtypes.decode(dtypes.encode(w, "float16"), "float16")
    d = arrays["a"] @ w.T
    if problem["format"] == "nvfp4":
        d *= arrays["global_scale"]
    if problem["dtype"] == FP8:
        d *= arrays["a_scale"][:, None]
    if problem["bias"]:
        d += arrays["bias"]
    return {"d": activate(problem["activation"], d)}


def _make_inputs(problem, normal):
    """D has a variance of about 1; a third of the rows of NVFP4 weights have subnormal scales.

    Padding of tiles is zero.
    """
    m, n, k, format = (problem[axis] for axis in ("M", "N", "K", "format"))
    blocks = normal((n, k // BLOCKS[format]))
    xp = library_of(blocks)
    spread = max(k, 1) ** -0.5 / 3.1  # 3.1: the deviation of codes times scales
    inputs = {"a": normal((m, k))}
    if format == "nvfp4":
        small = xp.where(normal((n, 1)) > 0.4, xp.float32(2.0**-7), xp.float32(1))
        scale = (1 + 0.5 * blocks / (1 + abs(blocks))) * small
        inputs["global_scale"] = spread * (1 + 0.1 * normal((1,)).clip(-3, 3))
    else:
        scale = 2.0 ** (xp.rint(xp.log2(xp.float32(spread))) + xp.rint(blocks).clip(-2, 1))
    codes = dtypes.encode(3 * normal((n, k)), CODES)
    scales = dtypes.encode(scale.astype("float32"), SCALE.where(problem.values))
    if problem["packing"] == "tiles":
        codes, scales = pack_codes(codes), pack_scales(scales, format)
    inputs["w"] = dtypes.decode(codes, CODES)
    inputs["w_scale"] = dtypes.decode(scales, SCALE.where(problem.values))
    if problem["dtype"] == FP8:
        inputs["a_scale"] = xp.exp(0.3 * normal((m,)))
    if problem["bias"]:
        inputs["bias"] = normal((n,))
    return inputs


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    a = m * k * dtypes.itemsize(problem["dtype"]) + (4 * m if problem["dtype"] == FP8 else 0)
    rows, code_bytes, scales = _sizes(problem.values)
    d = 2 * (m * out_cols(problem) + (n if problem["bias"] else 0))
    return int(a + rows * (code_bytes + scales) + d)


def _constraint(problem: Problem) -> str | None:
    if problem["K"] % block_of(problem.values):
        return f"blocks of {problem['format']} are {block_of(problem.values)} elements long"
    if problem["activation"] == "swiglu" and problem["N"] % 2:
        return f"swiglu pairs rows of W, and N={problem['N']} is odd"
    return None


def product(m: int, n: int, k: int, **axes: bool | str) -> Problem:
    """bfloat16 activations by NVFP4 rows, with nothing after it, unless ``axes`` say so."""
    others = {
        "dtype": "bfloat16", "format": "nvfp4", "packing": "rows", "bias": False,
        "activation": "none", **axes,
    }  # fmt: skip
    return Problem.of("nvfp4_matmul", M=m, N=n, K=k, **others)


SHAPES = ((4096, 4096), (8192, 8192), (5760, 2880), (2880, 2880), (14336, 4096), (7168, 18432))
"""N and K: squares, gpt-oss, Llama 3 and DeepSeek-V3."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048, 8192)


def _names() -> dict[str, Problem]:
    names = {f"{m}x{n}x{k}": product(m, n, k) for n, k in SHAPES for m in ROWS}
    for m in (1, 64, 8192):
        for n, k in ((5760, 2880), (2880, 2880)):
            names[f"{m}x{n}x{k}-mxfp4"] = product(m, n, k, format="mxfp4")
        names[f"{m}x8192x8192-w4a8"] = product(m, 8192, 8192, dtype=FP8)
    tiles = {f"{name}-tiles": _in_tiles(problem) for name, problem in names.items()}
    return names | tiles


def _in_tiles(problem: Problem) -> Problem:
    return Problem.of("nvfp4_matmul", **{**problem.values, "packing": "tiles"})


ENTRY = Entry(
    name="nvfp4_matmul",
    summary="D = activation(A @ W^T + bias), weights in NVFP4 or MXFP4, A in 16 bits or float8.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 300),
        Axis.size("N", "rows of W, columns of D (twice as many for swiglu)", 0, 400),
        Axis.size("K", "columns of A and W, a multiple of the block", 0, 608, step=16),
        Axis.choice("dtype", "element type of A", *DTYPES),
        Axis.choice("format", "of W, told by the scales' element type", *FORMATS),
        Axis.choice("packing", "how W lies", *PACKINGS, default="rows"),
        Axis.flag("bias", "whether a bias is added before the activation", minor=True),
        Axis.choice(
            "activation", "applied to the product", *ACTIVATIONS, default="none", minor=True
        ),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand"),
        Tensor("w", (W_ROWS, W_BYTES), CODES, "weights: pairs of values"),
        Tensor("w_scale", (W_ROWS, W_SCALES), SCALE, "of 16 (nvfp4) or 32 (mxfp4) of a row"),
        Tensor(
            "global_scale", (1,), "float32", "what products are multiplied by",
            flag="format", when="nvfp4",
        ),
        Tensor("a_scale", ("M",), "float32", "of rows of A in float8", flag="dtype", when=FP8),
        Tensor("bias", ("N",), OUT, "added to every row of the product", flag="bias"),
    ),
    outputs=(Tensor("d", ("M", OUT_COLS), OUT, "the result"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    # As gemm's and, of float8, fp8_gemm's: an implementation may use its tensor cores.
    tolerance={
        "bfloat16": Tolerance(2e-3, 2**-8),
        "float16": Tolerance(5e-4, 2**-10),
        FP8: Tolerance(2**-7, 2**-8),
    },
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(Peer("cublas", torch_matmul),),
    constraint=_constraint,
)  # fmt: skip
