"""`gemm`: D = A @ B^T (+ bias), bfloat16 or float16 in and out, float32 accumulation."""

from __future__ import annotations

from kernelcat.errors import MissingDependency
from kernelcat.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance

DTYPES = ("bfloat16", "float16")


def _oracle(problem, arrays):
    d = arrays["a"] @ arrays["b"].T
    return {"d": d + arrays["bias"] if problem["bias"] else d}


def _make_inputs(problem, normal):
    """B is scaled by K^-1/2, so that D has variance 1 and a lost k-slice shows."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    inputs = {"a": normal((m, k)), "b": normal((n, k)) * max(k, 1) ** -0.5}
    return inputs | {"bias": normal((n,))} if problem["bias"] else inputs


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return 2 * (m * k + n * k + m * n + (n if problem["bias"] else 0))


def _problem(m: int, n: int, k: int, dtype: str = "bfloat16", bias: bool = False) -> Problem:
    return Problem.of("gemm", M=m, N=n, K=k, dtype=dtype, bias=bias)


def _cublas():
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer cublas needs torch: pip install torch") from error

    def make(problem, arrays):
        a, b, d = arrays["a"], arrays["b"].t(), arrays["d"]
        if problem["bias"]:
            return lambda: torch.addmm(arrays["bias"], a, b, out=d)
        return lambda: torch.mm(a, b, out=d)

    return make


def _quack():
    """QuACK chooses its configuration by a tuner of its own, at the first call with a shape."""
    try:
        from quack.gemm_interface import gemm
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer quack needs: pip install quack-kernels") from error

    def make(problem, arrays):
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
"""Large squares, DeepSeek-V3 projections, and one ragged in every axis."""

GPT_OSS = tuple(
    (m, n, k)
    for n, k in ((5120, 2880), (2880, 4096), (201088, 2880))
    for m in (1, 8, 64, 1024, 8192)
)
"""QKV projection, output projection and vocabulary of gpt-oss-20b."""

ENTRY = Entry(
    name="gemm",
    summary="D = A @ B^T (+ bias): dense matrix product, float32 accumulation.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 400),
        Axis.size("N", "rows of B, columns of D", 0, 400),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of A, B, bias and D", *DTYPES),
        Axis.flag("bias", "whether a bias is added"),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand"),
        Tensor("b", ("N", "K"), "dtype", "right operand, transposed"),
        Tensor("bias", ("N",), "dtype", "added to every row of D", flag="bias"),
    ),
    outputs=(Tensor("d", ("M", "N"), "dtype", "the product"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(2e-3, 2**-8), "float16": Tolerance(5e-4, 2**-10)},
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={"x".join(map(str, shape)): _problem(*shape) for shape in TARGETS + GPT_OSS},
    peers=(Peer("cublas", _cublas), Peer("quack", _quack)),
)
