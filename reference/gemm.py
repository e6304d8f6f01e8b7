"""`gemm`: D = activation(A @ B^T + bias) + residual, the dense matrix product.

A (M, K) and B (N, K) are bfloat16 or float16, and so is D (M, N); sums are float32. Bias (N,),
activation and residual (the shape of D) are optional (`_epilogue` defines the activations; swiglu
makes D (M, N / 2)).
"""

from __future__ import annotations

from random import Random

from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance
from kernelcat.errors import Unsupported
from kernelcat.reference._epilogue import (
    ACTIVATION,
    ACTIVATIONS,
    BIAS,
    OUT_COLS,
    activate,
    odd_error,
    out_cols,
    torch_activation,
)
from kernelcat.reference._models import MODELS, SHARDS
from kernelcat.reference._peers import import_torch, required_by
from kernelcat.reference._random_sizes import MAX_FLOPS, any_size, log_uniform, weight_sizes

DTYPES = ("bfloat16", "float16")


def _oracle(problem, arrays):
    d = arrays["a"] @ arrays["b"].T
    if problem["bias"]:
        d += arrays["bias"]
    d = activate(problem["activation"], d)
    if problem["residual"]:
        d += arrays["residual"]
    return {"d": d}


def _make_inputs(problem, normal):
    """B is scaled by K^-1/2, so that D has variance 1 and a missing slice of K shows."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    inputs = {"a": normal((m, k)), "b": normal((n, k)) * max(k, 1) ** -0.5}
    if problem["bias"]:
        inputs["bias"] = normal((n,))
    if problem["residual"]:
        inputs["residual"] = normal((m, out_cols(problem)))
    return inputs


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    d = m * out_cols(problem) * (2 if problem["residual"] else 1)
    return 2 * (m * k + n * k + d + (n if problem["bias"] else 0))


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> Problem:
    """The problem A @ B^T without bias, activation and residual."""
    return Problem.of(
        "gemm", M=m, N=n, K=k, dtype=dtype, bias=False, activation="none", residual=False
    )


def _cublas():
    """cuBLAS through torch; activation and residual are separate torch kernels after it."""
    torch = import_torch("cublas")

    def make(problem, arrays):
        a, b, d, bias = arrays["a"], arrays["b"].t(), arrays["d"], arrays.get("bias")
        residual, activation = arrays.get("residual"), torch_activation(problem["activation"])

        def multiply(out=None):
            return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

        if problem["activation"] == "none" and residual is None:
            return lambda: multiply(out=d)
        if residual is None:
            return lambda: d.copy_(activation(multiply()))
        return lambda: torch.add(activation(multiply()), residual, out=d)

    return make


def _quack():
    """QuACK, which tunes itself at the first call with a shape."""
    with required_by("quack", "pip install quack-kernels"):
        from quack.gemm_interface import gemm

    def make(problem, arrays):
        if problem["activation"] != "none" or problem["residual"]:
            raise Unsupported("QuACK is raced without activation and residual")
        a, b, d, bias = arrays["a"], arrays["b"].t(), arrays["d"], arrays.get("bias")
        return lambda: gemm(a, b, out=d, bias=bias)

    return make


TARGETS = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (4096, 7168, 2048),
    (4096, 24576, 1536),
    (128, 24576, 1536),
    (64, 7168, 16384),
    (64, 2112, 7168),
    (16, 7168, 2048),
    (4097, 5000, 2056),
)
"""M, N and K: squares, DeepSeek-V3's projections, and a shape that no tile divides evenly."""

GPT_OSS = tuple(
    (m, n, k)
    for n, k in ((5120, 2880), (2880, 4096), (201088, 2880))
    for m in (1, 8, 64, 1024, 8192)
)
"""gpt-oss-20b's QKV projection, output projection and vocabulary."""

MIDDLE = (
    (64, 32, 2880),
    (100, 2112, 7168),
    (160, 4096, 14336),
    (200, 8192, 28672),
    (256, 7168, 18432),
    (256, 57344, 8192),
    (1000, 256, 7168),
)
"""Few or middle rows and few columns: tiles that do not fill the GPU's last wave, among them."""


def _random_problem(dice: Random) -> Problem:
    """A layer's projection, one in 12 a vocabulary's; bfloat16, a quarter with bias."""
    if dice.random() < 1 / 12:
        model = dice.choice(list(MODELS.values()))
        m, n, k = log_uniform(dice, 1, 512), model.vocab // dice.choice(SHARDS), model.hidden
        return product(m, n // 8 * 8, k)
    m, (n, k) = log_uniform(dice, 1, 8192), weight_sizes(dice, 8)
    return Problem.of("gemm", **{**product(m, n, k).values, "bias": dice.random() < 0.25})


def _unusual_problem(dice: Random) -> Problem:
    """Any sizes, rows that begin at any multiple of 2 bytes, any epilogue."""
    while True:
        problem = Problem.of(
            "gemm", M=log_uniform(dice, 1, 16384), N=any_size(dice, 32768), K=any_size(dice, 32768),
            dtype=dice.choice(DTYPES), bias=dice.random() < 0.25, residual=dice.random() < 0.25,
            activation=dice.choice(ACTIVATIONS),
        )  # fmt: skip
        if ENTRY.flops(problem) <= MAX_FLOPS and ENTRY.constraint(problem) is None:
            return problem


ENTRY = Entry(
    name="gemm",
    summary="D = activation(A @ B^T + bias) + residual: dense matrix product.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 400, varies=True, fine=True),
        Axis.size("N", "rows of B; columns of D (N / 2 for swiglu)", 0, 400),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of all arrays", *DTYPES, minor=True),
        BIAS,
        ACTIVATION,
        Axis.flag("residual", "whether a matrix is added after the activation", minor=True),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand A"),
        Tensor("b", ("N", "K"), "dtype", "right operand B, which is multiplied transposed"),
        Tensor("bias", ("N",), "dtype", "added to every row of A @ B^T", flag="bias"),
        Tensor("residual", ("M", OUT_COLS), "dtype", "added after the activation", flag="residual"),
    ),
    outputs=(Tensor("d", ("M", OUT_COLS), "dtype", "the result D"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(2e-3, 2**-8), "float16": Tolerance(5e-4, 2**-10)},
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={"x".join(map(str, shape)): product(*shape) for shape in TARGETS + GPT_OSS + MIDDLE},
    random_problem=_random_problem,
    unusual_problem=_unusual_problem,
    peers=(Peer("cublas", _cublas), Peer("quack", _quack)),
    constraint=lambda problem: odd_error(problem, "B"),
)
