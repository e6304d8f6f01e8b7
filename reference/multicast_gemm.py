"""`multicast_gemm`: D = A @ B^T by clusters of thread blocks that share what they load."""

from __future__ import annotations

from kernelcat.errors import MissingDependency
from kernelcat.spec import Axis, Entry, Peer, Problem, Tensor, Tolerance

DTYPES = ("bfloat16", "float16")


def _oracle(problem, arrays):
    return {"d": arrays["a"] @ arrays["b"].T}


def _make_inputs(problem, normal):
    """B is scaled by K^-1/2, so that D has variance 1 and a lost k-slice shows."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    return {"a": normal((m, k)), "b": normal((n, k)) * max(k, 1) ** -0.5}


def _bytes_moved(problem: Problem) -> int:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return 2 * (m * k + n * k + m * n)


def _cublas():
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer cublas needs torch: pip install torch") from error

    def make(problem, arrays):
        a, b, d = arrays["a"], arrays["b"].t(), arrays["d"]
        return lambda: torch.mm(a, b, out=d)

    return make


def _quack():
    """QuACK chooses its configuration by a tuner of its own, at the first call with a shape."""
    try:
        from quack.gemm_interface import gemm
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer quack needs: pip install quack-kernels") from error

    def make(problem, arrays):
        a, b, d = arrays["a"], arrays["b"].t(), arrays["d"]
        return lambda: gemm(a, b, out=d)

    return make


TARGETS = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (4096, 7168, 2048),
    (4096, 24576, 1536),
    (4097, 5000, 2056),
)
"""Large squares, DeepSeek-V3 projections, and one ragged in every axis: `gemm`'s large problems."""

ENTRY = Entry(
    name="multicast_gemm",
    summary="D = A @ B^T by thread block clusters that share operands: what multicast buys.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 1200),
        Axis.size("N", "rows of B, columns of D", 0, 1200),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of A, B and D", *DTYPES, minor=True),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand"),
        Tensor("b", ("N", "K"), "dtype", "right operand, transposed"),
    ),
    outputs=(Tensor("d", ("M", "N"), "dtype", "the product"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance={"bfloat16": Tolerance(2e-3, 2**-8), "float16": Tolerance(5e-4, 2**-10)},
    flops=lambda problem: 2 * problem["M"] * problem["N"] * problem["K"],
    bytes_moved=_bytes_moved,
    problems={
        f"{m}x{n}x{k}": Problem.of("multicast_gemm", M=m, N=n, K=k, dtype="bfloat16")
        for m, n, k in TARGETS
    },
    peers=(Peer("cublas", _cublas), Peer("quack", _quack)),
)
