"""`moe_combine`: what the ranks' experts made of a token back to its rank, added up.

Rank r holds sums[r, i], its experts' weighted sum for the token in row i, as `moe_dispatch` gave
rows and as `moe_gemm` makes them with ``combine``. For token t of rank s:

    out[s, t] = residual[s, t] + sum over the ranks r to which it came of sums[r, row_of[r, s, t]]

in float32 from left to right, with the ranks in their order, and rounded once: results equal the
oracle's bit for bit. Sums travel in ``dtype``. `expert_ids` are those of the dispatch: they say
to which ranks a token came. Rows of `sums` that no token has are never read.

Sources: those of `moe_dispatch`.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Problem, Tensor
from kernelcat.reference._arrays import library_of
from kernelcat.reference._exchange import (
    DTYPES,
    EXPERT_IDS,
    ROUTING,
    ROW_OF,
    ROWS,
    draw_expert_ids,
    error,
    mean_rows,
    rows_of,
)
from kernelcat.reference.moe_dispatch import BATCHES, MODELS


def _oracle(problem, arrays):
    dtype, row_of = problem["dtype"], arrays["row_of"]
    xp = library_of(row_of)
    shape = (problem["ranks"], problem["tokens"], problem["hidden"])
    total = xp.zeros(shape, dtype="float32")
    if problem["residual"]:
        total = dtypes.decode(arrays["residual"], dtype)
    for rank in range(problem["ranks"]):
        rows = row_of[rank].clip(0, None)
        sums = dtypes.decode(arrays["sums"][rank][rows], dtype)
        total = xp.where((row_of[rank] >= 0)[..., None], total + sums, total)
    return {"out": dtypes.encode(total, dtype)}


def _make_inputs(problem, normal):
    """Ranks differ in magnitude, so the order of the sum shows; unused rows are NaN."""
    ids = draw_expert_ids(problem, normal)
    xp = library_of(ids)
    row_of, counts = rows_of(problem, ids)
    ranks, tokens, hidden = (problem[axis] for axis in ("ranks", "tokens", "hidden"))
    sums = normal((ranks, ranks * tokens, hidden))
    for rank, count in enumerate(counts):
        sums[rank] *= 4.0 ** (rank % 3)
        sums[rank, count:] = xp.nan
    inputs = {"sums": sums, "row_of": xp.stack(row_of), "expert_ids": ids}
    if problem["residual"]:
        inputs["residual"] = normal((ranks, tokens, hidden))
    return inputs


def _bytes_moved(problem: Problem) -> int:
    """Bytes that one rank moves: it reads its sums and the residual, and writes out."""
    tokens, hidden = problem["tokens"], problem["hidden"]
    rows = mean_rows(problem) + tokens * (2 if problem["residual"] else 1)
    maps = 4 * tokens * (problem["ranks"] + problem["top_k"])
    return int(rows * hidden * dtypes.itemsize(problem["dtype"]) + maps)


def combined(tokens: int, hidden: int, experts: int, top_k: int, **axes) -> Problem:
    """The problem of ``experts`` experts on two ranks; ``axes`` replaces any other choice."""
    others = {
        "ranks": 2, "dtype": "bfloat16", "residual": False, "skew": "uniform", "batch": "full",
        **axes,
    }  # fmt: skip
    local = experts // others["ranks"]
    return Problem.of(
        "moe_combine", tokens=tokens, hidden=hidden, local_experts=local, top_k=top_k, **others
    )


def _problems() -> dict[str, Problem]:
    named = {f"{name}-{tokens}": combined(tokens, *sizes)
             for name, sizes in MODELS.items() for tokens in BATCHES}  # fmt: skip
    return named | {"dsv3-128-residual": combined(128, *MODELS["dsv3"], residual=True)}


ENTRY = Entry(
    name="moe_combine",
    summary="Results of experts on several ranks back to the tokens' ranks, added up in order.",
    axes=(
        *ROUTING,
        Axis.choice("dtype", "element type of sums, residual and out", *DTYPES),
        Axis.flag("residual", "whether a residual is added", minor=True),
    ),
    inputs=(
        Tensor("sums", ("ranks", ROWS, "hidden"), "dtype", "weighted sums of a rank's experts"),
        ROW_OF,
        EXPERT_IDS,
        Tensor(
            "residual", ("ranks", "tokens", "hidden"), "dtype", "added first", flag="residual"
        ),
    ),
    outputs=(Tensor("out", ("ranks", "tokens", "hidden"), "dtype", "the sums of all ranks"),),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: int(mean_rows(problem) * problem["hidden"]),
    bytes_moved=_bytes_moved,
    problems=_problems(),
    constraint=error,
    ranks="ranks",
)  # fmt: skip
