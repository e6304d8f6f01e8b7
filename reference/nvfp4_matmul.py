"""`nvfp4_matmul`: D = activation(global_scale * (A @ W^T) + bias), weights in NVFP4 or MXFP4.

W (N, K) has E2M1 codes and a scale for each 16 (NVFP4) or 32 (MXFP4) elements of a row, as `_fp4`
defines them. The element type of the scales decides the format. ``dtype`` is that of A (M, K):

    dtype                value of A[m, k]                        D          called
    bfloat16, float16    a                                       as A       W4A16
    float8_e4m3fn        a * a_scale[m]                          bfloat16   W4A8
    float4_e2m1fn_x2     a * a_block_scale[m, k / block]         bfloat16   W4A4

With A in 16 bits, weights w * w_scale are rounded to A's type before they are multiplied. NVFP4's
weights are exact in both types, MXFP4's in bfloat16. A in 4 bits has the format of W and is what
`nvfp4_quantize` makes. Sums are float32. NVFP4 has global_scale, float32 (1,): W's, or the product
of W's and A's if A is in NVFP4 too. Bias (N,) and activation are those of `gemm` (`_epilogue`).

``packing`` is the order of the weights in memory. ``rows`` is that of `nvfp4_quantize` and of
checkpoints; ``tiles`` is the order of tensor-core registers (`_fp4_tiles`), which
`kernelcat.layers.fp4.prepack` makes once. Block scales are linear. Only those that Blackwell's
tensor cores read, of A in 4 bits and of W in rows beside it, are swizzled (`_fp4`).

Scales must be neither negative nor NaN; zero and subnormal scales are valid.
"""

from __future__ import annotations

from random import Random

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
from kernelcat.reference._epilogue import (
    ACTIVATION,
    ACTIVATIONS,
    BIAS,
    OUT_COLS,
    activate,
    odd_error,
    out_cols,
)
from kernelcat.reference._fp4 import (
    BLOCKS,
    CODES,
    FORMATS,
    SCALE,
    block_error,
    block_of,
    global_scale_of,
    padded,
    quantize,
    swizzle,
    swizzled_shape,
    unswizzle,
)
from kernelcat.reference._fp4_tiles import (
    CODE_BYTES,
    TILE_COLS,
    TILE_ROWS,
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
)
from kernelcat.reference._nvfp4_peers import torch_matmul
from kernelcat.reference._random_sizes import MAX_FLOPS, any_size, log_uniform, weight_sizes

FP8, FP4 = "float8_e4m3fn", CODES
DTYPES = ("bfloat16", "float16", FP8, FP4)
PACKINGS = ("rows", "tiles")
OUT = ElementType(
    "dtype",
    (("bfloat16", "bfloat16"), ("float16", "float16"), (FP8, "bfloat16"), (FP4, "bfloat16")),
)


# ---- shapes -------------------------------------------------------------------------------------


def is_swizzled(axes) -> bool:
    """Whether the scales of W are swizzled: where block-scaled tensor cores read them."""
    return axes["dtype"] == FP4 and axes["packing"] == "rows"


def _code_shape(axes):
    """Shape of W's codes in bytes."""
    n, k = axes["N"], axes["K"]
    if axes["packing"] == "rows":
        return n, k // 2
    return padded(n, TILE_ROWS), padded(k, TILE_COLS) // TILE_COLS * CODE_BYTES


def _scale_shape(axes):
    n, k, block = axes["N"], axes["K"], block_of(axes)
    if axes["packing"] == "rows":
        return swizzled_shape(n, k // block) if is_swizzled(axes) else (n, k // block)
    return padded(n, TILE_ROWS), padded(k, TILE_COLS) // TILE_COLS * (TILE_COLS // block)


def _a_scale_shape(axes):
    return swizzled_shape(axes["M"], axes["K"] // block_of(axes))


A_COLS = Derived(
    "K, or K/2 in 4 bits",
    lambda axes: axes["K"] // 2 if axes["dtype"] == FP4 else axes["K"],
    tells=("K", lambda size, axes: 2 * size if axes["dtype"] == FP4 else size),
)
A_SCALES = (
    Derived("M padded to 128", lambda axes: _a_scale_shape(axes)[0]),
    Derived("K/16 or K/32 padded to 4", lambda axes: _a_scale_shape(axes)[1]),
)
W_CODES = (
    Derived("N padded to 16 in tiles", lambda axes: _code_shape(axes)[0]),
    Derived("K/2 padded to 32 in tiles", lambda axes: _code_shape(axes)[1]),
)
W_SCALES = (
    Derived(
        "N padded to 16 in tiles or to 128 if swizzled", lambda axes: _scale_shape(axes)[0]
    ),
    Derived(
        "K/16 or K/32 (K padded to 64 in tiles; the quotient to 4 if swizzled)",
        lambda axes: _scale_shape(axes)[1],
    ),
)  # fmt: skip


# ---- the oracle ---------------------------------------------------------------------------------


def weights(problem, codes, scales):
    """Float32 weights w * w_scale (N, K) of ``codes`` and ``scales``, uint8 as they are stored."""
    n, k, format = problem["N"], problem["K"], problem["format"]
    if problem["packing"] == "tiles":
        codes, scales = unpack_codes(codes, n, k), unpack_scales(scales, format, n, k)
    elif is_swizzled(problem.values):
        scales = unswizzle(scales, n, k // BLOCKS[format])
    scale = dtypes.decode(scales, SCALE.where(problem.values))
    return dtypes.decode(codes, CODES) * scale.repeat(BLOCKS[format], axis=1)


def _oracle(problem, arrays):
    """Oracles get decoded values, so bytes in the order of tiles are encoded again."""
    from numpy import errstate

    codes = dtypes.encode(arrays["w"], CODES)
    scales = dtypes.encode(arrays["w_scale"], SCALE.where(problem.values))
    w = weights(problem, codes, scales)
    if problem["dtype"] == "float16":
        with errstate(over="ignore"):
            w = dtypes.decode(dtypes.encode(w, "float16"), "float16")
    a = arrays["a"]
    if problem["dtype"] == FP4:
        block = BLOCKS[problem["format"]]
        scales = unswizzle(arrays["a_block_scale"], problem["M"], problem["K"] // block)
        a = a * scales.repeat(block, axis=1)
    d = a @ w.T
    if problem["format"] == "nvfp4":
        d *= arrays["global_scale"]
    if problem["dtype"] == FP8:
        d *= arrays["a_scale"][:, None]
    if problem["bias"]:
        d += arrays["bias"]
    return {"d": activate(problem["activation"], d)}


# ---- inputs -------------------------------------------------------------------------------------

A_AMAX = 6.0
"""The magnitude for which the global scale of drawn A is made; larger elements may saturate."""


def _make_inputs(problem, normal):
    """D has a variance of about 1; a third of the rows of NVFP4 weights have subnormal scales.

    Padding of tiles is zero. Beside the tensors there are the unquantized operands: ``_w``, W
    before it was quantized, and for A in 4 bits ``_a``.
    """
    m, n, k, format = (problem[axis] for axis in ("M", "N", "K", "format"))
    blocks = normal((n, k // BLOCKS[format]))
    xp = library_of(blocks)
    deviation = max(k, 1) ** -0.5 / 3.1  # 3.1: the standard deviation of codes times scales
    inputs = {"a": normal((m, k))}
    if format == "nvfp4":
        small = xp.where(normal((n, 1)) > 0.4, xp.float32(2.0**-7), xp.float32(1))
        scale = (1 + 0.5 * blocks / (1 + abs(blocks))) * small
        inputs["global_scale"] = deviation * (1 + 0.1 * normal((1,)).clip(-3, 3))
    else:
        scale = 2.0 ** (xp.rint(xp.log2(xp.float32(deviation))) + xp.rint(blocks).clip(-2, 1))
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


def _quantized(problem, a, global_scale):
    """Inputs for A in 4 bits: codes and scales of ``a`` (M, K), and both operands' global scale.

    ``global_scale`` is W's, None for MXFP4.
    """
    xp, format = library_of(a), problem["format"]
    is_nvfp4 = format == "nvfp4"
    a_global = xp.full((1,), global_scale_of(A_AMAX), dtype="float32") if is_nvfp4 else None
    codes, scales = quantize(a.astype("float64"), format, a_global)
    inputs = {
        "a": dtypes.decode(codes, CODES),
        "a_block_scale": dtypes.decode(swizzle(scales), SCALE.where(problem.values)),
        "_a": a,
    }
    return inputs | {"global_scale": global_scale * a_global} if is_nvfp4 else inputs


# ---- signal to quantization noise ---------------------------------------------------------------


def _exact(problem, drawn):
    """D of the unquantized operands."""
    d = drawn.get("_a", drawn["a"]) @ drawn["_w"].T
    if problem["dtype"] == FP8:
        d *= drawn["a_scale"][:, None]
    if problem["bias"]:
        d += drawn["bias"]
    return {"d": activate(problem["activation"], d)}


LEAST_SQNR = {"nvfp4": 16.0, "mxfp4": 12.0}
"""Signal to quantization noise that a product must have at least, in dB."""
MIN_WEIGHTS, MIN_OUTPUTS, MIN_ACTIVATED = 1 << 14, 1024, 4096
"""Elements of W and of D, without and with an activation, that make a ratio of sums meaningful."""
SWIGLU_LOSS = 4
"""dB that swiglu may lose: 3 because the noises of two multiplied products add up, and 1 because
the distribution of its results has heavier tails."""


def _least_sqnr(problem: Problem) -> float | None:
    """The least signal to quantization noise in dB, or None for small problems.

    In small problems the noise of one block, or one sum that cancels, decides the ratio. With an
    activation more elements are needed, because it leaves the tails of the distribution.
    """
    activation = problem["activation"]
    if problem["N"] * problem["K"] < MIN_WEIGHTS:
        return None
    min_outputs = MIN_OUTPUTS if activation == "none" else MIN_ACTIVATED
    if problem["M"] * out_cols(problem) < min_outputs:
        return None
    return LEAST_SQNR[problem["format"]] - (SWIGLU_LOSS if activation == "swiglu" else 0)


# ---- the entry ----------------------------------------------------------------------------------


def _bytes_moved(problem: Problem) -> int:
    m, n, k, axes = problem["M"], problem["N"], problem["K"], problem.values
    a = m * A_COLS.of(axes) * dtypes.itemsize(problem["dtype"])
    a += {FP8: 4 * m, FP4: m * k // block_of(axes)}.get(problem["dtype"], 0)
    w = sum(rows * cols for rows, cols in (_code_shape(axes), _scale_shape(axes)))
    d = 2 * (m * out_cols(problem) + (n if problem["bias"] else 0))
    return int(a + w + d)


def product(m: int, n: int, k: int, **axes: bool | str) -> Problem:
    """The product of bfloat16 A and NVFP4 W in rows, without bias and activation.

    ``axes`` replaces any of these choices.
    """
    others = {
        "dtype": "bfloat16", "format": "nvfp4", "packing": "rows", "bias": False,
        "activation": "none", **axes,
    }  # fmt: skip
    return Problem.of("nvfp4_matmul", M=m, N=n, K=k, **others)


SHAPES = ((4096, 4096), (8192, 8192), (5760, 2880), (2880, 2880), (14336, 4096), (7168, 18432))
"""N and K: squares, gpt-oss, Llama 3 and DeepSeek-V3."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048, 8192)
"""M."""


def _problems() -> dict[str, Problem]:
    problems = {f"{m}x{n}x{k}": product(m, n, k) for n, k in SHAPES for m in ROWS}
    for m in (1, 64, 8192):
        for n, k in ((5760, 2880), (2880, 2880)):
            problems[f"{m}x{n}x{k}-mxfp4"] = product(m, n, k, format="mxfp4")
        problems[f"{m}x8192x8192-w4a8"] = product(m, 8192, 8192, dtype=FP8)
    tiles = {f"{name}-tiles": _in_tiles(problem) for name, problem in problems.items()}
    # A in 4 bits is multiplied by tensor cores that read W in rows, so no W4A4 problem has tiles.
    for m in (1, 64, 8192):
        problems[f"{m}x8192x8192-w4a4"] = product(m, 8192, 8192, dtype=FP4)
    problems["8192x8192x8192-w4a4-mxfp4"] = product(8192, 8192, 8192, dtype=FP4, format="mxfp4")
    return problems | tiles


def _in_tiles(problem: Problem) -> Problem:
    return Problem.of("nvfp4_matmul", **{**problem.values, "packing": "tiles"})


def _random_problem(dice: Random) -> Problem:
    """A layer's projection in tiles, by bfloat16; a quarter in MXFP4. Half have at most 64 rows."""
    m, (n, k) = log_uniform(dice, 1, dice.choice((64, 8192))), weight_sizes(dice, TILE_COLS)
    return product(m, n, k, packing="tiles", format=dice.choice(("nvfp4",) * 3 + ("mxfp4",)))


def _unusual_problem(dice: Random) -> Problem:
    """Any sizes and options but A in 4 bits, which needs Blackwell's tensor cores."""
    while True:
        format = dice.choice(FORMATS)
        problem = product(
            log_uniform(dice, 1, 8192), any_size(dice, 32768),
            any_size(dice, 32768, BLOCKS[format]), dtype=dice.choice(DTYPES[:3]), format=format,
            packing=dice.choice(PACKINGS), bias=dice.random() < 0.25,
            activation=dice.choice(ACTIVATIONS),
        )  # fmt: skip
        if ENTRY.flops(problem) <= MAX_FLOPS and ENTRY.constraint(problem) is None:
            return problem


ENTRY = Entry(
    name="nvfp4_matmul",
    summary="D = activation(A @ W^T + bias), weights in NVFP4 or MXFP4, A in 16, 8 or 4 bits.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 300, varies=True, fine=True),
        Axis.size("N", "rows of W; columns of D (N / 2 for swiglu)", 0, 400),
        Axis.size(
            "K", "columns of A and W, a multiple of 16 (nvfp4) or 32 (mxfp4)", 0, 608, step=16
        ),
        Axis.choice("dtype", "element type of A", *DTYPES),
        Axis.choice("format", "follows from the element type of w_scale", *FORMATS),
        Axis.choice(
            "packing", "order of w and w_scale: rows, or tiles that fp4.prepack makes", *PACKINGS,
            default="rows",
        ),
        BIAS,
        ACTIVATION,
    ),
    inputs=(
        Tensor("a", ("M", A_COLS), "dtype", "left operand A; in 4 bits E2M1 codes, two in a byte"),
        Tensor("w", W_CODES, CODES, "E2M1 codes of the weights W, two in a byte"),
        Tensor(
            "w_scale", W_SCALES, SCALE,
            "factor of each 16 (nvfp4) or 32 (mxfp4) elements of a row of W",
        ),
        Tensor(
            "global_scale", (1,), "float32",
            "NVFP4: factor of A @ W^T; W's global scale, times A's if A is in 4 bits",
            flag="format", when="nvfp4",
        ),
        Tensor(
            "a_scale", ("M",), "float32", "factor of each row of A in float8",
            flag="dtype", when=FP8,
        ),
        Tensor(
            "a_block_scale", A_SCALES, SCALE,
            "factor of each 16 or 32 elements of a row of A in 4 bits, swizzled",
            flag="dtype", when=FP4,
        ),
        Tensor("bias", ("N",), OUT, "added to every row of the scaled product", flag="bias"),
    ),
    outputs=(Tensor("d", ("M", OUT_COLS), OUT, "the result D"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    # For 16 bits the tolerances of gemm, for float8 that of fp8_gemm, whose tensor cores an
    # implementation may use.
    tolerance={
        "bfloat16": Tolerance(2e-3, 2**-8),
        "float16": Tolerance(5e-4, 2**-10),
        FP8: Tolerance(2**-7, 2**-8),
        FP4: Tolerance(2e-3, 2**-8),
    },
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    unusual_problem=_unusual_problem,
    peers=(Peer("cublas", torch_matmul),),
    constraint=lambda problem: block_error(problem) or odd_error(problem, "W"),
    signal=Signal(_exact, _least_sqnr),
)  # fmt: skip
