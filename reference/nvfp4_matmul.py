"""`nvfp4_matmul`: D = activation(global_scale * (A @ W^T) + bias) with weights in NVFP4 or MXFP4.

W is (N, K), ``w = e2m1 * scale`` with one scale for 16 (NVFP4) or 32 (MXFP4) of a row; the scales'
element type says which. A is bfloat16 or float16 (W4A16), and weights are rounded to that type
before they are multiplied: NVFP4's fit exactly, MXFP4's fit bfloat16 exactly. Or A is float8_e4m3fn
with a float32 scale a row (W4A8), ``a = e4m3 * a_scale``, and D bfloat16. Or A is as W is (W4A4),
packed codes with ``a_block_scale``, as `nvfp4_quantize` makes them, and D bfloat16. Sums are
float32; ``global_scale``, float32 of (1,), is NVFP4's: what products are multiplied by (`_fp4`),
W's or, where A has one too, the product of both. bias, activations and swiglu's halved columns are
those of `gemm`.

``packing`` is how weights lie: ``rows``, as `nvfp4_quantize` and checkpoints have them, or
``tiles``, as `kernelcat.fp4.prepack` makes of those once (reference/_fp4_tiles.py has the order).
Block scales are linear, but those that Blackwell's tensor cores read, A's and those of the rows
that A in 4 bits is multiplied by, are swizzled (`_fp4`).

Scales must be neither negative nor NaN; zeros and subnormals count as they are.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import (
    Axis,
    Derived,
    ElementType,
    Entry,
    Peer,
    Problem,
    Signal,
    Tensor,
    Tolerance,
)
from kernelcat.reference._arrays import library_of
from kernelcat.reference._fp4 import (
    BLOCKS,
    CODES,
    FORMATS,
    SCALE,
    block_of,
    global_scale_of,
    quantize,
    swizzle,
    unswizzle,
)
from kernelcat.reference._fp4 import TILE_COLS as SWIZZLED_COLS
from kernelcat.reference._fp4 import TILE_ROWS as SWIZZLED_ROWS
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

FP8, FP4 = "float8_e4m3fn", CODES
DTYPES = ("bfloat16", "float16", FP8, FP4)
PACKINGS = ("rows", "tiles")
OUT = ElementType(
    "dtype",
    (("bfloat16", "bfloat16"), ("float16", "float16"), (FP8, "bfloat16"), (FP4, "bfloat16")),
)


def is_swizzled(axes) -> bool:
    """Whether W's scales are: block-scaled tensor cores read them."""
    return axes["dtype"] == FP4 and axes["packing"] == "rows"


def _sizes(axes):
    """Shapes of W's codes, as bytes, and of its scales, as they are stored."""
    n, k, size = axes["N"], axes["K"], block_of(axes)
    if axes["packing"] == "rows":
        return (n, k // 2), _swizzled_size(n, k // size) if is_swizzled(axes) else (n, k // size)
    rows, tiles = padded(n, TILE_ROWS), padded(k, TILE_COLS) // TILE_COLS
    return (rows, tiles * CODE_BYTES), (rows, tiles * (TILE_COLS // size))


def _swizzled_size(rows, cols):
    return padded(rows, SWIZZLED_ROWS), padded(cols, SWIZZLED_COLS)


A_COLS = Derived(
    "K, or K/2 in 4 bits",
    lambda axes: axes["K"] // 2 if axes["dtype"] == FP4 else axes["K"],
    tells=("K", lambda size, axes: 2 * size if axes["dtype"] == FP4 else size),
)
A_SCALES = (
    Derived("M, swizzled to 128", lambda axes: padded(axes["M"], SWIZZLED_ROWS)),
    Derived(
        "K/16 (nvfp4) or K/32 (mxfp4), swizzled to 4",
        lambda axes: padded(axes["K"] // block_of(axes), SWIZZLED_COLS),
    ),
)
W_CODES = (
    Derived("N, in tiles of 16", lambda axes: _sizes(axes)[0][0]),
    Derived("K/2, in tiles of 32", lambda axes: _sizes(axes)[0][1]),
)
W_SCALES = (
    Derived("N, in tiles of 16, swizzled to 128", lambda axes: _sizes(axes)[1][0]),
    Derived(
        "K/16 (nvfp4) or K/32 (mxfp4), in tiles of 64, swizzled to 4",
        lambda axes: _sizes(axes)[1][1],
    ),
)


def weights(problem, codes, scales):
    """Float32 (N, K) of stored bytes, without the global scale."""
    n, k, format = problem["N"], problem["K"], problem["format"]
    if problem["packing"] == "tiles":
        codes, scales = unpack_codes(codes, n, k), unpack_scales(scales, format, n, k)
    elif is_swizzled(problem.values):
        scales = unswizzle(scales, n, k // BLOCKS[format])
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
    a = arrays["a"]
    if problem["dtype"] == FP4:
        size = BLOCKS[problem["format"]]
        scales = unswizzle(arrays["a_block_scale"], problem["M"], problem["K"] // size)
        a = a * scales.repeat(size, axis=1)
    d = a @ w.T
    if problem["format"] == "nvfp4":
        d *= arrays["global_scale"]
    if problem["dtype"] == FP8:
        d *= arrays["a_scale"][:, None]
    if problem["bias"]:
        d += arrays["bias"]
    return {"d": activate(problem["activation"], d)}


def _make_inputs(problem, normal):
    """D has a variance of about 1; a third of the rows of NVFP4 weights have subnormal scales.

    Padding of tiles is zero. ``_w`` are the weights before they became codes, ``_a`` is A before
    it did.
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
    scales = dtypes.encode(scale.astype("float32"), SCALE.where(problem.values))
    scale = dtypes.decode(scales, SCALE.where(problem.values)).repeat(BLOCKS[format], axis=1)
    w = (3 * normal((n, k))).clip(-dtypes.E2M1_MAX, dtypes.E2M1_MAX)
    codes = dtypes.encode(w, CODES)
    inputs["_w"] = w * scale * inputs.get("global_scale", xp.float32(1))
    if problem["packing"] == "tiles":
        codes, scales = pack_codes(codes), pack_scales(scales, format)
    elif is_swizzled(problem.values):
        scales = swizzle(scales)
    inputs["w"] = dtypes.decode(codes, CODES)
    inputs["w_scale"] = dtypes.decode(scales, SCALE.where(problem.values))
    if problem["dtype"] == FP8:
        inputs["a_scale"] = xp.exp(0.3 * normal((m,)))
    if problem["dtype"] == FP4:
        inputs |= _quantized(problem, inputs["a"], inputs.get("global_scale"))
    if problem["bias"]:
        inputs["bias"] = normal((n,))
    return inputs


A_AMAX = 6.0
"""The largest element of A that its global scale is for; it may be larger, and saturate less."""


def _quantized(problem, a, global_scale):
    """What A becomes in 4 bits, and the global scale of both operands."""
    xp, format = library_of(a), problem["format"]
    own = xp.full((1,), global_scale_of(A_AMAX), dtype="float32") if format == "nvfp4" else None
    codes, scales = quantize(a.astype("float64"), format, own)
    element = SCALE.where(problem.values)
    found = {
        "a": dtypes.decode(codes, CODES),
        "a_block_scale": dtypes.decode(swizzle(scales), element),
        "_a": a,
    }
    return found if own is None else found | {"global_scale": global_scale * own}


def _exact(problem, drawn):
    """D of weights that are no codes and of A that is in float32."""
    d = drawn.get("_a", drawn["a"]) @ drawn["_w"].T
    if problem["dtype"] == FP8:
        d *= drawn["a_scale"][:, None]
    if problem["bias"]:
        d += drawn["bias"]
    return {"d": activate(problem["activation"], d)}


LEAST_SQNR = {"nvfp4": 16.0, "mxfp4": 12.0}
"""Signal to quantization noise of products, in dB."""


def _least_sqnr(problem: Problem) -> float | None:
    """None of so few elements that one block's noise, or one sum that cancels, decides.

    An activation needs more of them: it leaves the tails. swiglu multiplies two products, whose
    noises add up, which is 3 dB, and tails are heavier still.
    """
    activation = problem["activation"]
    if problem["N"] * problem["K"] < 1 << 14:
        return None
    if problem["M"] * out_cols(problem) < (1024 if activation == "none" else 4096):
        return None
    return LEAST_SQNR[problem["format"]] - (4 if activation == "swiglu" else 0)


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    a = m * A_COLS.of(problem.values) * dtypes.itemsize(problem["dtype"])
    a += {FP8: 4 * m, FP4: m * k // block_of(problem.values)}.get(problem["dtype"], 0)
    w = sum(rows * cols for rows, cols in _sizes(problem.values))
    d = 2 * (m * out_cols(problem) + (n if problem["bias"] else 0))
    return int(a + w + d)


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
    # A in 4 bits is for tensor cores that read W in rows: of tiles it has no problem to race.
    for m in (1, 64, 8192):
        names[f"{m}x8192x8192-w4a4"] = product(m, 8192, 8192, dtype=FP4)
    names["8192x8192x8192-w4a4-mxfp4"] = product(8192, 8192, 8192, dtype=FP4, format="mxfp4")
    return names | tiles


def _in_tiles(problem: Problem) -> Problem:
    return Problem.of("nvfp4_matmul", **{**problem.values, "packing": "tiles"})


ENTRY = Entry(
    name="nvfp4_matmul",
    summary="D = activation(A @ W^T + bias), weights in NVFP4 or MXFP4, A in 16, 8 or 4 bits.",
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
        Tensor("a", ("M", A_COLS), "dtype", "left operand"),
        Tensor("w", W_CODES, CODES, "weights: pairs of values"),
        Tensor("w_scale", W_SCALES, SCALE, "of 16 (nvfp4) or 32 (mxfp4) of a row"),
        Tensor(
            "global_scale", (1,), "float32", "what products are multiplied by",
            flag="format", when="nvfp4",
        ),
        Tensor("a_scale", ("M",), "float32", "of rows of A in float8", flag="dtype", when=FP8),
        Tensor(
            "a_block_scale", A_SCALES, SCALE, "of 16 or 32 of a row of A in 4 bits",
            flag="dtype", when=FP4,
        ),
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
        FP4: Tolerance(2e-3, 2**-8),
    },
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_names(),
    peers=(Peer("cublas", torch_matmul),),
    constraint=_constraint,
    signal=Signal(_exact, _least_sqnr),
)  # fmt: skip
