"""`all_reduce`: the sum of an array over all ranks, on every rank.

    out[r] = x[0] + x[1] + ... + x[ranks - 1]    for every rank r, summed up in this order

The sum is in float32 and is rounded once, so all ranks hold the same bits, and any implementation
gives the same bits as the oracle. Each rank is a process, with one GPU or a share of it, and holds
x[r] and out[r] alone.

Sources: Rabenseifner, "Optimization of collective reduction operations", 2004 (two-shot); NCCL's
protocol LL (flags that travel with the data); the one-shot and two-shot kernels of TensorRT-LLM,
vLLM and torch's symmetric memory.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Problem, Tensor
from kernelcat.reference._arrays import library_of

DTYPES = ("bfloat16", "float16")
MAX_RANKS = 8
"""GPUs of one host."""


def _oracle(problem, arrays):
    dtype = problem["dtype"]
    total = dtypes.decode(arrays["x"][0], dtype)
    for rank in range(1, problem["ranks"]):
        total = total + dtypes.decode(arrays["x"][rank], dtype)
    row = dtypes.encode(total, dtype)
    return {"out": library_of(row).stack([row] * problem["ranks"])}


def _make_inputs(problem, normal):
    """Ranks differ in magnitude, so the order of the sum shows in its last bits."""
    x = normal((problem["ranks"], problem["tokens"], problem["hidden"]))
    for rank in range(problem["ranks"]):
        x[rank] *= 4.0 ** (rank % 3)
    return {"x": x}


def _bytes_moved(problem: Problem) -> int:
    """Bytes that one rank moves: it reads its x and writes its out."""
    size = problem["tokens"] * problem["hidden"] * dtypes.itemsize(problem["dtype"])
    return int(2 * size)


def summed(tokens: int, hidden: int, ranks: int = 2) -> Problem:
    """The problem of summing up bfloat16 (tokens, hidden) over ``ranks``."""
    return Problem.of(
        "all_reduce", tokens=tokens, hidden=hidden, ranks=ranks, dtype="bfloat16"
    )  # fmt: skip


TOKENS = (1, 64, 128, 1024, 8192)
HIDDEN = (2880, 7168)
"""gpt-oss and DeepSeek-V3."""

ENTRY = Entry(
    name="all_reduce",
    summary="Sum of an array over all ranks, on every rank.",
    axes=(
        Axis.size("tokens", "rows of x", 0, 60, varies=True),
        Axis.size("hidden", "columns of x", 0, 3000),
        Axis.choice("ranks", "processes", *range(2, MAX_RANKS + 1), default=2),
        Axis.choice("dtype", "element type of x and out", *DTYPES, minor=True),
    ),
    inputs=(Tensor("x", ("ranks", "tokens", "hidden"), "dtype", "what each rank adds"),),
    outputs=(Tensor("out", ("ranks", "tokens", "hidden"), "dtype", "the sum, on each rank"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: (problem["ranks"] - 1) * problem["tokens"] * problem["hidden"],
    bytes_moved=_bytes_moved,
    problems={f"{t}x{h}": summed(t, h) for h in HIDDEN for t in TOKENS},
    without_peer={"*": "python -m kernelcat.ranks.race races NCCL and torch's symmetric memory"},
    work_in_progress=True,
    ranks="ranks",
)
