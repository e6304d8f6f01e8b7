"""Exchange of tokens between ranks that hold different experts: what dispatch and combine share.

Rank r holds the experts r * local_experts to (r + 1) * local_experts - 1. A token *comes* to each
rank that holds one of its experts, once; a token whose ids are all -1 comes to none, so a batch
with fewer tokens than the arrays have rows ends with such ids. A rank gives the tokens that come to
it rows in the order of their ranks, and of the tokens of a rank.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis, Derived, Tensor
from kernelcat.reference._assignments import SKEW, draw_ids
from kernelcat.reference.all_reduce import MAX_RANKS

DTYPES = ("bfloat16", "float16")
MAX_TOP_K = 16
MAX_EXPERTS = 32768
"""Experts of all ranks: ids travel in 16 bits."""

TOKENS = Axis.size("tokens", "rows of each rank's x", 0, 60, varies=True)
HIDDEN = Axis.size("hidden", "elements of a token", 16, 1200, step=16)
TOP_K = Axis.size("top_k", "experts that serve a token, 1 to 16", 1, 9)
LOCAL_EXPERTS = Axis.size("local_experts", "experts that each rank holds", 1, 24)
RANKS = Axis.choice("ranks", "processes", *range(2, MAX_RANKS + 1), default=2)
BATCH = Axis.choice(
    "batch", "whether all rows of x hold tokens, or the last rows of odd ranks hold none",
    "full", "uneven", default="full", drawn=True,
)  # fmt: skip
ROUTING = (TOKENS, HIDDEN, TOP_K, LOCAL_EXPERTS, RANKS, SKEW, BATCH)

ROWS = Derived("ranks*tokens", lambda axes: axes["ranks"] * axes["tokens"])
EXPERT_IDS = Tensor(
    "expert_ids", ("ranks", "tokens", "top_k"), "int32",
    "experts of each rank's tokens, counted over all ranks; -1 for none",
)  # fmt: skip
ROW_OF = Tensor(
    "row_of", ("ranks", "ranks", "tokens"), "int32",
    "row_of[r, s, t]: the row of token t of rank s at rank r; -1 where it does not come",
)  # fmt: skip


def num_experts(problem) -> int:
    """Experts of all ranks."""
    return int(problem["ranks"] * problem["local_experts"])


def error(problem) -> str | None:
    """Why tokens cannot have ``top_k`` of these experts, or None."""
    experts = num_experts(problem)
    if not 1 <= problem["top_k"] <= min(experts, MAX_TOP_K):
        return f"top_k={problem['top_k']} must be 1 to {MAX_TOP_K}, and at most {experts} experts"
    if experts > MAX_EXPERTS:
        return f"{experts} experts of all ranks are more than {MAX_EXPERTS}"
    return None


def draw_expert_ids(problem, normal):
    """``expert_ids`` (ranks, tokens, top_k), int32; about one assignment in 16 is dropped."""
    ranks, tokens, top_k = (problem[axis] for axis in ("ranks", "tokens", "top_k"))
    drawn = {
        "tokens": ranks * tokens, "top_k": top_k, "experts": num_experts(problem),
        "skew": problem["skew"],
    }  # fmt: skip
    ids = draw_ids(drawn, normal).reshape(ranks, tokens, top_k)
    if problem["batch"] == "uneven":
        ids[1::2, tokens // 3 :] = -1
    return ids


def holders(problem, ids):
    """The rank that holds each expert of ``ids``; -1 for none."""
    return ids // problem["local_experts"]  # -1 // n is -1


def rows_of(problem, ids):
    """``row_of`` (ranks, ranks, tokens), int32, and the number of rows of each rank, a list."""
    xp_ids, maps, counts = holders(problem, ids), [], []
    for rank in range(problem["ranks"]):
        comes = (xp_ids == rank).any(axis=2)
        row = comes.reshape(-1).cumsum().reshape(comes.shape) - 1
        maps.append((row * comes - ~comes).astype("int32"))
        counts.append(int(comes.sum()))
    return maps, counts


def mean_rows(problem) -> float:
    """Rows that a rank receives, estimated for experts chosen evenly."""
    experts, local, top_k = num_experts(problem), problem["local_experts"], problem["top_k"]
    nobody = 1.0
    for slot in range(top_k):
        nobody *= max(experts - local - slot, 0) / (experts - slot)
    return float(problem["ranks"] * problem["tokens"] * (1 - nobody))
