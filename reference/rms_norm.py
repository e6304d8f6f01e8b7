"""`rms_norm`: RMSNorm of rows, with an optional residual, to 16 bits, float8 or NVFP4.

    h = x                                    without residual
    h = x + residual, rounded to dtype       with residual; residual becomes h
    rstd = 1 / sqrt(sum(h^2) / N + eps)      for each row
    y = (h * rstd) * weight

All operations are in float32, each rounded to nearest. The order of the sum is that of
`nvfp4_quantize`: squares of neighbours are added, then neighbouring sums, and so on, with zeros
that pad N to a power of two. y is not rounded to 16 bits before it is quantized. So the definition
gives one result, bit by bit. NVFP4 is judged bit by bit: a scale at the border of two E4M3 values
changes the codes of its block, so no tolerance for codes would find errors. The other results are
judged with tolerances, because peers add in other orders.

``out_format`` chooses the outputs:

    same     y (M, N), rounded to dtype
    fp8      q (M, N) and scale (ceil(N / 128), M), in blocks of 1 x 128 as `_fp8` defines them
    nvfp4    codes (M, N / 2) and block_scale (M, N / 16), linear, as `_fp4` defines them, with the
             float32 global_scale (1,)

``residual`` is an output that is updated: pass the residual stream as the last array of ``out``,
and x is added to it. h and y must be finite, and eps must be at least 1e-12.

Sources: Zhang and Sennrich, "Root mean square layer normalization", 2019. FlashInfer and vLLM add
the residual in the same kernel (fused_add_rmsnorm).
"""

from __future__ import annotations

from random import Random

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Derived, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.reference import _fp4, _fp8
from kernelcat.reference._random_sizes import log_uniform, model_with, near
from kernelcat.reference._rms_norm_peers import flashinfer_norm, torch_compiled, torch_norm
from kernelcat.reference.nvfp4_quantize import MIN_EPS
from kernelcat.reference.nvfp4_quantize import rms_norm as normalize

DTYPES = ("bfloat16", "float16")
FORMATS = ("same", "fp8", "nvfp4")
NVFP4_BLOCK = _fp4.BLOCKS["nvfp4"]
PACKED_N = Derived("N/2", lambda axes: axes["N"] // 2)
FP8_BLOCKS = Derived("ceil(N/128)", lambda axes: -(-axes["N"] // _fp8.BLOCK))
NVFP4_BLOCKS = Derived("N/16", lambda axes: axes["N"] // NVFP4_BLOCK)


def _oracle(problem, arrays):
    dtype, h, outputs = problem["dtype"], arrays["x"], {}
    if problem["residual"]:
        h = dtypes.decode(dtypes.encode(h + arrays["residual"], dtype), dtype)
        outputs["residual"] = h
    y = normalize(h, arrays["weight"], problem["eps"])
    if problem["out_format"] == "same":
        return outputs | {"y": y}
    if problem["out_format"] == "fp8":
        q, scale = _fp8.quantize(y, rows=1)
        return outputs | {"q": dtypes.decode(q, _fp8.FP8), "scale": scale.T.copy()}
    codes, scale = _fp4.quantize(y.astype("float64"), "nvfp4", arrays["global_scale"])
    return outputs | {"codes": codes, "block_scale": scale}


def _make_inputs(problem, normal):
    """Rows have magnitudes from 2^-12 to 2^12, so eps matters; one row in nine is zero."""
    m, n = problem["M"], problem["N"]
    level = normal((m, 1))
    magnitude = 2.0 ** (12 * level / (1 + abs(level))) * (level > -1.2)
    inputs = {"x": normal((m, n)) * magnitude, "weight": 1 + 0.2 * normal((n,))}
    if problem["residual"]:
        inputs["residual"] = normal((m, n)) * magnitude
    if problem["out_format"] == "nvfp4":
        inputs["global_scale"] = 0.001 + 0.001 * abs(normal((1,)))
    return inputs


OUT_BITS = {"same": 16, "fp8": 8 + 32 / _fp8.BLOCK, "nvfp4": 4 + 8 / NVFP4_BLOCK}
"""Bits of an output element, with its part of a scale."""


def _bytes_moved(problem: Problem) -> int:
    """x, and the residual twice, and the outputs; the weight once."""
    m, n = problem["M"], problem["N"]
    bits = 16 + 32 * problem["residual"] + OUT_BITS[problem["out_format"]]
    return int(m * n * bits / 8) + 2 * n


def _constraint(problem: Problem) -> str | None:
    n = problem["N"]
    if problem["eps"] < MIN_EPS:
        return f"eps={problem['eps']} must be at least {MIN_EPS}"
    if problem["out_format"] == "nvfp4" and n % NVFP4_BLOCK:
        return f"N={n} must be a multiple of {NVFP4_BLOCK}: blocks of nvfp4 are {NVFP4_BLOCK} long"
    return None


def normed(m: int, n: int, **axes: bool | str) -> Problem:
    """The problem of normalizing bfloat16 (m, n) to bfloat16, changed by ``axes``."""
    defaults = {"dtype": "bfloat16", "residual": False, "out_format": "same", "eps": 1e-5}
    return Problem.of("rms_norm", M=m, N=n, **{**defaults, **axes})


TOKENS = (1, 8, 64, 1024, 16384)
MODELS = {
    "gpt-oss": (2880, {"residual": True}),
    "qwen3-30b": (2048, {"residual": True}),
    "qwen3-8b": (4096, {"residual": True, "out_format": "fp8"}),
    "deepseek-v3": (7168, {"residual": True, "out_format": "fp8"}),
}
"""Hidden size and variant."""


def _problems() -> dict[str, Problem]:
    named = {
        f"{model}-{m}": normed(m, n, **axes) for model, (n, axes) in MODELS.items() for m in TOKENS
    }
    return named | {
        "16384x4096": normed(16384, 4096),
        "16384x7168-nvfp4": normed(16384, 7168, residual=True, out_format="nvfp4"),
        "64x7168-nvfp4": normed(64, 7168, residual=True, out_format="nvfp4"),
    }


def _random_problem(dice: Random) -> Problem:
    """Rows of a model's width or a near one, to 16 bits or float8, mostly with a residual."""
    out_format, residual = dice.choice(("same", "same", "fp8")), dice.random() < 0.75
    n = near(dice, model_with(dice).hidden, _fp8.BLOCK if out_format == "fp8" else 8)
    return normed(log_uniform(dice, 1, 16384), n, residual=residual, out_format=out_format)


TOLERANCE = {"bfloat16": Tolerance(2**-20, 2**-7), "float16": Tolerance(2**-20, 2**-10)}
"""Twice the rounding to 16 bits: of h, and of y."""
Q_TOLERANCE = Tolerance(2**-9, 2**-3)
"""Distance of neighbouring E4M3 values, subnormal or not."""
SCALE_TOLERANCE = Tolerance(1e-15, 2**-8)
"""The rounding of h to bfloat16."""
RESIDUAL_TOLERANCE = Tolerance(0.0, 2**-20)
"""Less than the distance of neighbouring 16-bit values: h is exact."""

ENTRY = Entry(
    name="rms_norm",
    summary="RMSNorm with an optional residual, to 16 bits, float8 or NVFP4.",
    axes=(
        Axis.size("M", "rows of x", 0, 60, varies=True),
        Axis.size("N", "columns of x", 0, 3000),
        Axis.choice("dtype", "element type of x, weight and residual", *DTYPES, minor=True),
        Axis.flag("residual", "whether x is added to a residual first"),
        Axis.choice("out_format", "format of the result", *FORMATS, default="same"),
        Axis.number("eps", "added to the mean square, at least 1e-12", 1e-5, 1e-6, default=1e-5),
    ),
    inputs=(
        Tensor("x", ("M", "N"), "dtype", "rows to normalize"),
        Tensor("weight", ("N",), "dtype", "factor of each column"),
        Tensor(
            "global_scale", (1,), "float32",
            "NVFP4: factor of all values when they are read, 2^-64 to 2^64",
            flag="out_format", when="nvfp4",
        ),
    ),
    outputs=(
        Tensor("y", ("M", "N"), "dtype", "the result", flag="out_format", when="same"),
        Tensor(
            "q", ("M", "N"), _fp8.FP8, "result / scale, rounded to nearest",
            flag="out_format", when="fp8", tolerance=Q_TOLERANCE,
        ),
        Tensor(
            "scale", (FP8_BLOCKS, "M"), "float32",
            "scale[j, m] = max |y[m, 128 j : 128 (j + 1)]| / 448, as fp8_gemm reads it",
            flag="out_format", when="fp8", tolerance=SCALE_TOLERANCE,
        ),
        Tensor(
            "codes", ("M", PACKED_N), _fp4.CODES, _fp4.CODES_DOC,
            flag="out_format", when="nvfp4", tolerance=EXACT,
        ),
        Tensor(
            "block_scale", ("M", NVFP4_BLOCKS), "float8_e4m3fn",
            "factor of each 16 elements of a row", flag="out_format", when="nvfp4",
            tolerance=EXACT,
        ),
        Tensor(
            "residual", ("M", "N"), "dtype", "h = x + residual takes its place", flag="residual",
            tolerance=RESIDUAL_TOLERANCE, updated=True, accumulated=True,
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=TOLERANCE,
    flops=lambda problem: 4 * problem["M"] * problem["N"],
    bytes_moved=_bytes_moved,
    problems=_problems(),
    random_problem=_random_problem,
    peers=(
        Peer("torch", torch_norm), Peer("torch.compile", torch_compiled),
        Peer("flashinfer", flashinfer_norm),
    ),
    without_peer={
        "*-nvfp4": "peers are raced with outputs in 16 bits or float8",
    },
    constraint=_constraint,
)  # fmt: skip
