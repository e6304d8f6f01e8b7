"""`all_reduce`: the sum of an array over all ranks, on every rank; residual and RMSNorm are fused.

    out[r] = residual[r] + x[0] + x[1] + ... + x[ranks - 1]    for every rank r, in this order
    normed[r] = RMSNorm of the rows of out[r] with eps, times weight[r]    as in `rms_norm`

The residual and the norm are optional. The sum is in float32 and is rounded once, so all ranks with
the same residual hold the same bits, and any implementation gives the same bits as the oracle;
`normed` has the tolerance of `rms_norm`, and is made of the rounded out. Each rank is a process,
with one GPU or a share of it, and holds its part of each array alone.

Sources: Rabenseifner, "Optimization of collective reduction operations", 2004 (two-shot); NCCL's
protocol LL (flags that travel with the data); the one-shot and two-shot kernels of TensorRT-LLM,
vLLM and torch's symmetric memory; TensorRT-LLM's and FlashInfer's fused all-reduce (residual and
RMSNorm).
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Problem, Tensor
from kernelcat.reference._arrays import library_of
from kernelcat.reference.nvfp4_quantize import MIN_EPS
from kernelcat.reference.nvfp4_quantize import rms_norm as normalize
from kernelcat.reference.rms_norm import TOLERANCE

DTYPES = ("bfloat16", "float16")
MAX_RANKS = 8
"""GPUs of one host."""
SM_BLOCKS = 2
"""Thread blocks that an SM holds of a launch over several ranks, whose thread blocks wait for each
other and so all run at once: the launch bounds of all kernels ask for room for so many."""


def _oracle(problem, arrays):
    dtype, x, outs = problem["dtype"], arrays["x"], []
    for rank in range(problem["ranks"]):
        total = arrays["residual"][rank] + x[0] if problem["residual"] else x[0]
        for part in x[1:]:
            total = total + part
        outs.append(dtypes.encode(total, dtype))
    out = library_of(x).stack(outs)
    if not problem["norm"]:
        return {"out": out}
    h, weights = dtypes.decode(out, dtype), arrays["weight"]
    rows = [normalize(h[rank], weights[rank], problem["eps"]) for rank in range(problem["ranks"])]
    return {"out": out, "normed": library_of(x).stack(rows)}


def _make_inputs(problem, normal):
    """Ranks differ in magnitude, so the order of the sum shows in its last bits."""
    x = normal((problem["ranks"], problem["tokens"], problem["hidden"]))
    for rank in range(problem["ranks"]):
        x[rank] *= 4.0 ** (rank % 3)
    inputs = {"x": x}
    if problem["residual"]:
        inputs["residual"] = normal(x.shape)
    if problem["norm"]:
        inputs["weight"] = 1 + 0.2 * normal((problem["ranks"], problem["hidden"]))
    return inputs


def _bytes_moved(problem: Problem) -> int:
    """Bytes that one rank moves: it reads x, residual and weight, and writes out and normed."""
    size = problem["tokens"] * problem["hidden"] * dtypes.itemsize(problem["dtype"])
    weight = problem["hidden"] * dtypes.itemsize(problem["dtype"]) * problem["norm"]
    return int((2 + problem["residual"] + problem["norm"]) * size + weight)


def _constraint(problem: Problem) -> str | None:
    if problem["eps"] < MIN_EPS:
        return f"eps={problem['eps']} must be at least {MIN_EPS}"
    return None


def summed(tokens: int, hidden: int, ranks: int = 2, **axes) -> Problem:
    """The problem of summing up bfloat16 (tokens, hidden) over ``ranks``; ``axes`` are others."""
    others = {"dtype": "bfloat16", "residual": False, "norm": False, "eps": 1e-5, **axes}
    return Problem.of("all_reduce", tokens=tokens, hidden=hidden, ranks=ranks, **others)


def _problems() -> dict[str, Problem]:
    named = {f"{t}x{h}": summed(t, h) for h in HIDDEN for t in TOKENS}
    fused = {"residual": True, "norm": True}
    return named | {f"{t}x{h}-norm": summed(t, h, **fused) for h in HIDDEN for t in TOKENS[:4]}


TOKENS = (1, 64, 128, 1024, 8192)
HIDDEN = (2880, 7168)
"""gpt-oss and DeepSeek-V3."""

_ROWS = ("ranks", "tokens", "hidden")

ENTRY = Entry(
    name="all_reduce",
    summary="Sum of an array over all ranks, on every rank; residual and RMSNorm are fused.",
    axes=(
        Axis.size("tokens", "rows of x", 0, 60, varies=True),
        Axis.size("hidden", "columns of x", 0, 3000),
        Axis.choice("ranks", "processes", *range(2, MAX_RANKS + 1), default=2),
        Axis.choice("dtype", "element type of all arrays", *DTYPES, minor=True),
        Axis.flag("residual", "whether a residual is added"),
        Axis.flag("norm", "whether the sums are normalized too"),
        Axis.number("eps", "added to the mean square, at least 1e-12", 1e-5, 1e-6, default=1e-5),
    ),
    inputs=(
        Tensor("x", _ROWS, "dtype", "what each rank adds"),
        Tensor("residual", _ROWS, "dtype", "added first, on its rank", flag="residual"),
        Tensor("weight", ("ranks", "hidden"), "dtype", "of the norm", flag="norm"),
    ),
    outputs=(
        Tensor("out", _ROWS, "dtype", "the sum, on each rank", tolerance=EXACT),
        Tensor("normed", _ROWS, "dtype", "the sums, normalized", flag="norm"),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=TOLERANCE,
    constraint=_constraint,
    flops=lambda problem: (problem["ranks"] - 1) * problem["tokens"] * problem["hidden"],
    bytes_moved=_bytes_moved,
    problems=_problems(),
    without_peer={"*-norm": "NCCL and torch's symmetric memory sum up, without residual and norm"},
    ranks="ranks",
)
