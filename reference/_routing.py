"""Routing of tokens to experts: scores, candidates, places, weights. `moe_route` defines each.

All functions work on NumPy and CuPy arrays; scores are float64. Shapes are those of `moe_route`.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.spec import Problem
from kernelcat.reference._arrays import library_of


def capacity_of(problem: Problem) -> int:
    """Assignments that an expert may serve; the number of tokens without a limit.

    A token uses an expert at most once, so no expert serves more assignments than tokens.
    """
    tokens, factor = problem["tokens"], problem["capacity_factor"]
    if not factor:
        return int(tokens)
    return min(ceil(factor * (tokens * problem["top_k"]) / problem["experts"]), int(tokens))


def reroutes(problem: Problem) -> bool:
    """Whether assignments beyond the capacity are offered to further experts."""
    return bool(problem["overflow"] == "reroute" and problem["capacity_factor"])


def logits_of(problem, arrays):
    """The logits (tokens, experts) in float64, given or computed."""
    if not problem["product"]:
        return arrays["logits"].astype("float64")
    logits = arrays["x"].astype("float64") @ arrays["router"].astype("float64").T
    return logits + arrays["router_bias"] if problem["router_bias"] else logits


def selection_scores(problem, logits, correction):
    """What experts are selected by (tokens, experts), before the limit to groups."""
    if problem["score"] == "softmax":
        return logits
    scores = sigmoid(logits)
    return scores + correction.astype("float64") if problem["correction"] else scores


def sigmoid(logits):
    """1 / (1 + exp(-logits)), 0 for -inf."""
    return 1 / (1 + library_of(logits).exp(-logits.clip(-700, 700))) * (logits != -float("inf"))


def best_two(problem, scores):
    """The two best selection scores of each group, best last: (tokens, groups, 1 or 2)."""
    groups, size = problem["groups"], problem["experts"] // problem["groups"]
    grouped = scores.reshape(problem["tokens"], groups, size)
    return library_of(scores).sort(grouped, axis=-1)[..., -2:]


def limit_to_groups(problem, scores):
    """The scores with -inf for experts outside a token's best groups."""
    groups, top_groups = problem["groups"], problem["top_groups"]
    if top_groups >= groups:
        return scores
    xp, token = library_of(scores), library_of(scores).arange(problem["tokens"])[:, None]
    order = descending(best_two(problem, scores).sum(axis=-1))
    is_limited = xp.ones((problem["tokens"], groups), dtype=bool)
    is_limited[token, order[:, :top_groups]] = False
    outside = is_limited.repeat(problem["experts"] // groups, axis=1)
    return xp.where(outside, -float("inf"), scores)


def descending(scores):
    """Indices that sort each row in descending order; equal scores by index.

    The difference has no -0, which some sorts place before 0.
    """
    return library_of(scores).argsort(0.0 - scores, axis=-1, kind="stable")


def rank_among(ids, num_ids: int):
    """For each element of ``ids`` (n,): how many earlier elements are equal."""
    xp = library_of(ids)
    order = xp.argsort(ids, kind="stable")
    counts = xp.bincount(ids, minlength=num_ids)
    ranks = xp.zeros_like(order)
    ranks[order] = xp.arange(ids.size) - (xp.cumsum(counts) - counts)[ids[order]]
    return ranks


def place(problem, scores, ids):
    """``ids`` (tokens, top_k) after the capacity limit: -1 where dropped.

    ``scores`` are the selection scores, limited to groups.
    """
    xp, experts, capacity = library_of(ids), problem["experts"], capacity_of(problem)
    is_served = (rank_among(ids.ravel(), experts) < capacity).reshape(ids.shape)
    placed = xp.where(is_served, ids, -1)
    if not reroutes(problem):
        return placed
    candidates, unplaced = descending(scores), ~is_served
    while unplaced.any():
        placed, unplaced = _reroute_round(problem, scores, candidates, placed, unplaced)
    return placed


def _reroute_round(problem, scores, candidates, placed, unplaced):
    """One round of proposals: new ``placed``, and what is still ``unplaced`` but not dropped."""
    xp, experts = library_of(placed), problem["experts"]
    token = xp.arange(problem["tokens"])[:, None]
    served = xp.bincount(placed[placed >= 0], minlength=experts)
    room = capacity_of(problem) - served
    is_used = xp.zeros((problem["tokens"], experts + 1), dtype=bool)
    is_used[token, placed] = True  # -1 is the last column
    is_open = (room > 0) & ~is_used[:, :experts] & (scores > -float("inf"))
    is_open = is_open[token, candidates]
    is_closed = (~is_open).astype("int32")  # CuPy sorts numbers only
    first = xp.argsort(is_closed, axis=1, kind="stable")[:, : problem["top_k"]]
    number = xp.cumsum(unplaced, axis=1) - 1  # of the proposal among those of the token
    proposes = unplaced & (number < is_open.sum(axis=1)[:, None])
    proposal = candidates[token, first[token, number * proposes]]
    flat = xp.where(proposes, proposal, experts).ravel()
    rank = rank_among(flat, experts + 1).reshape(placed.shape)
    is_accepted = proposes & (rank < room[proposal])
    return xp.where(is_accepted, proposal, placed), proposes & ~is_accepted


def weights_of(problem, logits, selected, placed):
    """Weights (tokens, top_k), 0 where ``placed`` is -1.

    Sums are over ``selected``, the experts before the limit, unless assignments are rerouted.
    """
    xp, token = library_of(placed), library_of(placed).arange(problem["tokens"])[:, None]
    is_softmax = problem["score"] == "softmax"
    scores = xp.exp(logits - logits.max(axis=1, keepdims=True)) if is_softmax else sigmoid(logits)
    summed = placed if reroutes(problem) else selected
    if problem["renormalize"]:
        total = (scores[token, summed] * (summed >= 0)).sum(axis=1, keepdims=True) + 1e-20
    else:
        total = scores.sum(axis=1, keepdims=True) if is_softmax else 1.0
    weights = scores[token, placed] / total * problem["scaling"]
    return xp.where(placed >= 0, weights, 0)


def index_maps(problem, placed):
    """counts, offsets, order and position of ``placed`` (tokens, top_k), by name."""
    xp, experts = library_of(placed), problem["experts"]
    flat = xp.where(placed >= 0, placed, experts).ravel()
    counts = xp.bincount(flat, minlength=experts + 1)[:experts]
    offsets = xp.concatenate((xp.zeros(1, dtype=counts.dtype), xp.cumsum(counts)))
    order, position = xp.argsort(flat, kind="stable"), xp.full(flat.shape, -1)
    is_served = xp.arange(flat.size) < offsets[-1]
    position[order[is_served]] = xp.arange(flat.size)[is_served]
    return {
        "counts": counts,
        "offsets": offsets,
        "order": xp.where(is_served, order, -1),
        "position": position.reshape(placed.shape),
    }
