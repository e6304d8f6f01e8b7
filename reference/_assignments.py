"""Assignments of tokens to experts: drawn ids, and the index maps by which rows are grouped.

Assignment ``token * top_k + slot`` says that ``ids[token, slot]`` serves a token; -1 stands for a
dropped one. Grouped products see assignments sorted by expert:

    offsets   (experts + 1,)     expert e serves rows offsets[e] to offsets[e + 1] - 1
    order     (tokens * top_k,)  row -> assignment; -1 from offsets[experts] on
    position  (tokens, top_k)    assignment -> row; -1 for a dropped one

Rows of an expert are in the order of assignments. `moe_route` makes these maps.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, erfc, sqrt

from kernelcat.catalog.precondition import Precondition, rising
from kernelcat.catalog.spec import Axis, Derived, Tensor
from kernelcat.reference._arrays import library_of

SKEWS = ("uniform", "zipf", "hot")
SKEW = Axis.choice(
    "skew",
    "how tokens spread over experts: evenly, by Zipf's law, or the first expert serves them all",
    *SKEWS, default="uniform", drawn=True,
)  # fmt: skip
TOKENS = Axis.size("tokens", "tokens", 0, 160, varies=True)
TOP_K = Axis.size("top_k", "experts that serve a token", 1, 6)
ASSIGNMENTS = Derived("tokens*top_k", lambda axes: axes["tokens"] * axes["top_k"])
MAX_DRAWN = 1024
"""Tokens of the draw that counts active experts; more tokens reach hardly any further expert."""
OFFSETS = Tensor(
    "offsets", (Derived("experts+1", lambda axes: axes["experts"] + 1),), "int32",
    "expert e serves rows offsets[e] to offsets[e + 1] - 1",
)  # fmt: skip
ORDER = Tensor("order", (ASSIGNMENTS,), "int32", "row -> token * top_k + slot, or -1")
POSITION = Tensor("position", ("tokens", "top_k"), "int32", "assignment -> row, or -1")


def preferences(problem, normal):
    """Random scores (tokens, experts), float32: experts that the skew favours have higher ones."""
    xp, experts = library_of(normal((1,))), problem["experts"]
    scores = normal((problem["tokens"], experts))
    if problem["skew"] == "zipf":
        scores = scores - 1.5 * xp.log(xp.arange(1, experts + 1, dtype="float32"))
    elif problem["skew"] == "hot":
        scores[:, 0] += 20
    return scores.astype("float32")


def draw_ids(problem, normal):
    """Ids (tokens, top_k), int32: each token's experts differ; about one in 16 is dropped."""
    xp, k = library_of(normal((1,))), problem["top_k"]
    ids = xp.argsort(-preferences(problem, normal), axis=1)[:, :k].astype("int32")
    ids[normal((problem["tokens"], k)) > 1.5] = -1
    return ids


def index_maps(ids, experts: int) -> dict:
    """``offsets``, ``order`` and ``position`` of ``ids`` (tokens, top_k), int32 by tensor name."""
    xp = library_of(ids)
    flat = ids.reshape(-1)
    keys = xp.where(flat < 0, experts, flat).astype("int64") * max(flat.size, 1)
    order = xp.argsort(keys + xp.arange(flat.size)).astype("int32")
    counts = (flat[None, :] == xp.arange(experts)[:, None]).sum(axis=1)
    offsets = xp.zeros(experts + 1, dtype="int32")
    offsets[1:] = xp.cumsum(counts)
    position = xp.zeros(flat.size, dtype="int32")
    position[order] = xp.arange(flat.size, dtype="int32")
    return {
        "offsets": offsets,
        "order": xp.where(flat[order] < 0, -1, order).astype("int32"),
        "position": xp.where(flat < 0, -1, position).astype("int32").reshape(ids.shape),
    }


@lru_cache(256)
def active_experts(tokens: int, top_k: int, experts: int, skew: str) -> int:
    """Experts that serve at least one of ``tokens`` tokens, counted in one random draw."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = {"tokens": min(tokens, MAX_DRAWN), "top_k": top_k, "experts": experts, "skew": skew}
    scores = preferences(shape, lambda size: rng.standard_normal(size, dtype=np.float32))
    return int(np.unique(np.argsort(-scores, axis=1)[:, :top_k]).size)


def active(problem) -> int:
    """Experts that serve at least one token of ``problem``."""
    return active_experts(*(problem[axis] for axis in ("tokens", "top_k", "experts", "skew")))


def row_blocks(problem, size: int) -> float:
    """Blocks of ``size`` rows of all experts, estimated: an expert's last block may be partial.

    The rows of an active expert are taken as normally distributed, as independent choices of the
    tokens make them, whatever the skew.
    """
    num_active = active(problem)
    rows = problem["tokens"] * problem["top_k"] / max(num_active, 1)
    deviation = sqrt(rows * max(1 - problem["top_k"] / problem["experts"], 0))
    first = max(ceil((rows - 4 * deviation) / size), 1)
    blocks = float(first)
    for full in range(first, int((rows + 4 * deviation) / size) + 1):
        distance = (full * size + 0.5 - rows) / max(deviation, 1e-9)
        blocks += 0.5 * erfc(distance / sqrt(2))
    return num_active * blocks


def top_k_error(problem) -> str | None:
    """Why a token cannot have ``top_k`` experts, or None."""
    if not 1 <= problem["top_k"] <= problem["experts"]:
        return f"top_k={problem['top_k']} must be from 1 to experts={problem['experts']}"
    return None


# ---- what the maps must hold --------------------------------------------------------------------


def _is_no_assignment(axes, values):
    """A mask of the elements of ``order`` in an expert's rows that are no assignment."""
    order, rows = values["order"], values["offsets"][-1]
    is_row = library_of(order).arange(len(order)) < rows
    return is_row & ((order < 0) | (order >= len(order)))


def _is_after_the_last_row(axes, values):
    order, rows = values["order"], values["offsets"][-1]
    return (library_of(order).arange(len(order)) >= rows) & (order != -1)


def _is_repeated(axes, values):
    order, rows = values["order"], values["offsets"][-1]
    xp = library_of(order)
    mask = xp.arange(len(order)) < rows
    mask[xp.unique(order[: int(rows)], return_index=True)[1]] = False
    return mask


def _is_not_the_row(axes, values):
    """A mask of the elements of ``position`` that disagree with ``order``."""
    order, rows, position = values["order"], int(values["offsets"][-1]), values["position"]
    xp = library_of(order)
    expected = xp.full(len(order), -1)
    expected[order[:rows]] = xp.arange(rows)
    return position != expected.reshape(position.shape)


MAP_PRECONDITIONS = (
    *rising("offsets"),
    Precondition(
        "offsets", "there are {tokens} tokens with {top_k} assignments each",
        lambda axes, values: values["offsets"] > axes["tokens"] * axes["top_k"],
    ),
    Precondition(
        "order", "there are {tokens} tokens with {top_k} assignments each", _is_no_assignment,
        reads=("offsets",),
    ),
    Precondition(
        "order", "must be -1 from row offsets[experts] on", _is_after_the_last_row,
        reads=("offsets",),
    ),
    Precondition("order", "an earlier row has this assignment", _is_repeated, reads=("offsets",)),
    Precondition(
        "position", "order has another row, or none (-1), for this assignment", _is_not_the_row,
        reads=("offsets", "order"),
    ),
)  # fmt: skip
"""``offsets`` grow up to the number of assignments; ``order`` and ``position`` are inverse."""
