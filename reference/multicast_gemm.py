"""`multicast_gemm`: D = A @ B^T by clusters of thread blocks that share the operands they load.

The function is that of `gemm` without bias, activation and residual. The entry is separate because
its implementations differ only in how operands reach the thread blocks of a cluster (TMA
multicast, distributed shared memory, or separate loads), so that their times show what each
transfer is worth.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis, Entry, Peer, Problem, Tensor
from kernelcat.reference import gemm


def _as_gemm(problem: Problem) -> Problem:
    return gemm.product(problem["M"], problem["N"], problem["K"], problem["dtype"])


def _adapted(peer: Peer) -> Peer:
    """A peer of `gemm` as a peer of this entry."""

    def load():
        make = peer.load()
        return lambda problem, arrays: make(_as_gemm(problem), arrays)

    return Peer(peer.name, load)


TARGETS = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (4096, 7168, 2048),
    (4096, 24576, 1536),
    (4097, 5000, 2056),
)
"""M, N and K: the large problems of `gemm`."""

ENTRY = Entry(
    name="multicast_gemm",
    summary="D = A @ B^T by thread block clusters that share operands: what multicast buys.",
    axes=(
        Axis.size("M", "rows of A and D", 0, 1200, varies=True),
        Axis.size("N", "rows of B, columns of D", 0, 1200),
        Axis.size("K", "columns of A and B", 0, 600),
        Axis.choice("dtype", "element type of A, B and D", *gemm.DTYPES, minor=True),
    ),
    inputs=(
        Tensor("a", ("M", "K"), "dtype", "left operand A"),
        Tensor("b", ("N", "K"), "dtype", "right operand B, which is multiplied transposed"),
    ),
    outputs=(Tensor("d", ("M", "N"), "dtype", "the product D"),),
    oracle=lambda problem, arrays: gemm.ENTRY.oracle(_as_gemm(problem), arrays),
    make_inputs=lambda problem, normal: gemm.ENTRY.make_inputs(_as_gemm(problem), normal),
    tolerance=gemm.ENTRY.tolerance,
    flops=lambda problem: gemm.ENTRY.flops(_as_gemm(problem)),
    bytes_moved=lambda problem: gemm.ENTRY.bytes_moved(_as_gemm(problem)),
    problems={
        f"{m}x{n}x{k}": Problem.of("multicast_gemm", M=m, N=n, K=k, dtype="bfloat16")
        for m, n, k in TARGETS
    },
    peers=tuple(map(_adapted, gemm.ENTRY.peers)),
)
