"""Drawn inputs of `moe_route`: no choice among experts is left to rounding.

- Given logits are compared as they are. Every third token has logits on a coarse grid, with many
  ties, and every fifth token has -inf where its first experts suffice.
- A product has x, router and bias on grids so coarse that float32 sums are exact in any order.
- Sigmoids are rounded. A token with selection scores, or sums of groups, that are closer than
  float32 can tell apart gets logits of 0 instead: s is then exactly 0.5, and corrections are
  multiples of 2^-10, so that all sums are exact.
"""

from __future__ import annotations

from math import log2

from kernelcat import dtypes
from kernelcat.reference._arrays import library_of
from kernelcat.reference._routing import (
    best_two,
    descending,
    limit_to_groups,
    logits_of,
    reroutes,
    selection_scores,
)

SKEWS = ("uniform", "zipf", "hot", "equal")
"""No expert is preferred; frequencies follow Zipf's law; one hot expert; all logits are equal."""
MARGIN, GROUP_MARGIN = 2**-19, 2**-17
"""Differences of scores, and of sums of groups, that float32 certainly tells apart."""


def draw_routing(problem, normal):
    """The inputs by name, float32."""
    inputs = _draw_product(problem, normal) if problem["product"] else _draw_logits(problem, normal)
    if problem["correction"]:
        inputs["correction"] = (256 * normal((problem["experts"],))).round() / 1024
    if problem["score"] == "sigmoid":
        _make_safe(problem, inputs)
    return inputs


def _preferences(problem, normal):
    """What is added to the logits of each expert (experts,): multiples of 1/16."""
    order = descending(normal((problem["experts"],)))
    if problem["skew"] == "zipf":
        return (-16 * library_of(order).log1p(order)).round().astype("float32") / 16
    return (6.0 * (problem["skew"] == "hot") * (order == 0)).astype("float32")


def _draw_logits(problem, normal):
    tokens, experts = problem["tokens"], problem["experts"]
    logits = 1.5 * normal((tokens, experts)) + _preferences(problem, normal)
    if problem["skew"] == "equal":
        logits *= 0
    logits[::3] = (4 * logits[::3]).round() / 4
    xp = library_of(logits)
    place = (xp.arange(experts) + xp.arange(tokens)[:, None]) % experts
    is_masked = place >= max(problem["top_k"], experts // 2)
    is_masked[xp.arange(tokens) % 5 != 4] = False
    logits[is_masked] = -xp.inf
    return {"logits": dtypes.decode(dtypes.encode(logits, problem["dtype"]), problem["dtype"])}


def _draw_product(problem, normal):
    """Elements of -1, 0 and 1 times powers of two; preferences are in the first column."""
    tokens, experts, hidden = (problem[axis] for axis in ("tokens", "experts", "hidden"))
    x, router = (normal((rows, hidden)).round().clip(-1, 1) for rows in (tokens, experts))
    router *= 2.0 ** -round(log2(hidden) / 2)  # logits have a variance of about 1
    x[:, 0], router[:, 0] = 1, _preferences(problem, normal)
    if problem["skew"] == "equal":
        x *= 0
    inputs = {"x": x, "router": router}
    if problem["router_bias"]:
        inputs["router_bias"] = (8 * normal((experts,))).round().clip(-16, 16) / 16
    return inputs


def _make_safe(problem, inputs):
    """Sets logits, or x, of unsafe tokens to 0; and the bias where a token with x = 0 is unsafe."""
    if problem["router_bias"]:
        bias = inputs["router_bias"].astype("float64")
        if _is_unsafe(problem, inputs, bias[None].repeat(problem["tokens"], axis=0)).any():
            inputs["router_bias"] *= 0
    unsafe = _is_unsafe(problem, inputs, logits_of(problem, inputs))
    inputs["x" if problem["product"] else "logits"][unsafe] = 0


def _is_unsafe(problem, inputs, logits):
    """Whether rounding may decide what a token selects (tokens,)."""
    xp, scores = library_of(logits), selection_scores(problem, logits, inputs.get("correction"))
    unsafe = _is_group_unsafe(problem, scores)
    scores = limit_to_groups(problem, scores).clip(-1e3, None)  # differences of -inf are NaN
    depth = problem["experts"] if reroutes(problem) else problem["top_k"] + 1
    best = -xp.sort(-scores, axis=1)[:, :depth]
    gap = best[:, :-1] - best[:, 1:]
    return unsafe | ((gap > 0) & (gap < MARGIN)).any(axis=1)


def _is_group_unsafe(problem, scores):
    """Whether rounding may decide which groups a token has (tokens,): the last one or the next."""
    xp, last = library_of(scores), problem["top_groups"] - 1
    if last + 1 >= problem["groups"]:
        return xp.zeros(problem["tokens"], dtype=bool)
    two, token = best_two(problem, scores), xp.arange(problem["tokens"])
    order = descending(two.sum(axis=-1))
    inside, outside = (two[token, order[:, i]] for i in (last, last + 1))
    is_close = inside.sum(axis=1) - outside.sum(axis=1) < GROUP_MARGIN
    return is_close & (inside != outside).any(axis=1)
