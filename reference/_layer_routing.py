"""Routing: which experts serve a token, and with which weights, from the logits of a router.

    score    selects the largest          weight of a selected expert e
    softmax  logits                       softmax(logits)[e]; with `renormalize` the softmax runs
                                          over the selected experts alone
    sigmoid  sigmoid(logits) + correction sigmoid(logits)[e]; with `renormalize` divided by the sum
                                          over the selected experts + 1e-20

Weights are then multiplied by ``scaling``. Equal selection scores go to the lower id. With
``groups`` > 1 (sigmoid only) experts are ``groups`` groups of consecutive ids; a token may select
from the ``top_groups`` groups with the largest sums of their two best selection scores. Sources:
softmax with renormalisation, gpt-oss, Mixtral and Qwen3; sigmoid, DeepSeek-V3's technical report.

Selections are exact. So drawn logits never leave a selection to rounding: :func:`clear_logits`
replaces the rows where it could.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis
from kernelcat.reference._arrays import library_of

SCORES = ("softmax", "sigmoid")
SCORE = Axis.choice("score", "function of logits that makes scores", *SCORES, default="softmax")
RENORMALIZE = Axis.flag("renormalize", "whether the weights of a token add up to 1", minor=True)
GROUPS = Axis.size("groups", "groups of experts", 1, 4, default=1)
TOP_GROUPS = Axis.size("top_groups", "groups that a token may select from", 1, 4, default=1)
SCALING = Axis.number("scaling", "factor of all weights", 1.0, 2.5, default=1.0)
CORRECTION = Axis.flag("correction", "whether a bias is added to select (sigmoid)", minor=True)

MIN_MARGIN = 1e-5
"""Selection scores that decide must differ by this much, unless they are equal by definition."""


def routing_error(problem) -> str | None:
    """Why these axes describe no routing, or None."""
    experts, groups, top = problem["experts"], problem["groups"], problem["top_groups"]
    if not 1 <= problem["top_k"] <= experts:
        return f"top_k={problem['top_k']} must be from 1 to experts={experts}"
    if groups < 1 or experts % groups:
        return f"groups={groups} must divide experts={experts}"
    if not 1 <= top <= groups:
        return f"top_groups={top} must be from 1 to groups={groups}"
    if problem["top_k"] > top * (experts // groups):
        return f"top_k={problem['top_k']} exceeds the experts of top_groups={top} groups"
    if problem["score"] != "sigmoid" and (groups > 1 or problem["correction"]):
        return "groups and correction are for score=sigmoid"
    return None


def _sigmoid(x):
    import numpy as np

    return 1 / (1 + np.exp(-x))


def selection_scores(problem, logits, correction=None):
    """Scores (tokens, experts) by which experts are selected; -inf outside of the best groups."""
    if problem["score"] == "softmax":
        return logits
    xp, groups = library_of(logits), problem["groups"]
    scores = _sigmoid(logits)
    if correction is not None:
        scores = scores + correction
    if groups > 1:
        chosen = _order(_group_sums(scores, groups))[:, : problem["top_groups"]]
        allowed = (chosen[:, :, None] == xp.arange(groups)).any(axis=1)
        allowed = allowed.repeat(problem["experts"] // groups, axis=1)
        scores = xp.where(allowed, scores, -xp.inf)
    return scores


def _group_sums(scores, groups: int):
    """Sums of the two best scores of each group, (tokens, groups)."""
    xp = library_of(scores)
    grouped = scores.reshape(len(scores), groups, scores.shape[1] // groups)
    best = xp.sort(grouped, axis=2)[:, :, -2:]
    return best.sum(axis=2)


def _order(scores):
    """Columns of each row by descending score, equal scores by ascending column."""
    xp = library_of(scores)
    if xp.__name__ == "numpy":
        return xp.argsort(-scores, axis=1, kind="stable")
    return xp.argsort(-scores, axis=1)  # CuPy's sort is stable


def select(problem, logits, correction=None):
    """``(ids, weights)`` (tokens, top_k), int32 and float, by descending selection score.

    ``logits`` is (tokens, experts), float; ``correction`` (experts,) or None.
    """
    import numpy as np

    xp = library_of(logits)
    ids = _order(selection_scores(problem, logits, correction))[:, : problem["top_k"]]
    chosen = xp.take_along_axis(logits, ids, axis=1)
    if problem["score"] == "sigmoid":
        weights = _sigmoid(chosen)
        if problem["renormalize"]:
            weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    else:
        summed = chosen if problem["renormalize"] else logits
        top = chosen[:, :1]
        weights = np.exp(chosen - top) / np.exp(summed - top).sum(axis=1, keepdims=True)
    return ids.astype("int32"), weights * problem["scaling"]


def clear_logits(problem, logits, correction=None):
    """``logits`` with zero rows in place of those whose selection float32 rounding could change.

    Only sigmoid's scores are rounded. A row of zeros has scores of exactly 0.5 + correction, and
    corrections are multiples of 2^-6, so all its sums are exact.
    """
    if problem["score"] == "softmax":
        return logits
    xp = library_of(logits)
    unclear = xp.zeros(len(logits), dtype="bool")
    exact = logits.astype("float64")
    if problem["groups"] > 1:
        free = {**problem.values, "groups": 1, "top_groups": 1}
        sums = _group_sums(selection_scores(free, exact, correction), problem["groups"])
        unclear |= _is_close(sums, problem["top_groups"])
    scores = selection_scores(problem, exact, correction)
    unclear |= _is_close(scores, problem["top_k"])
    return xp.where(unclear[:, None], xp.float32(0), logits)


def _is_close(scores, count: int):
    """Rows in which one of the ``count`` + 1 best scores nearly equals the next one."""
    xp = library_of(scores)
    best = -xp.sort(-scores, axis=1)[:, : count + 1]
    gaps = best[:, :-1] - best[:, 1:]
    return (gaps < MIN_MARGIN).any(axis=1)


def draw_correction(problem, normal):
    """A correction (experts,) of multiples of 2^-6, about 0.1 in magnitude."""
    xp = library_of(normal((1,)))
    return (xp.rint(6 * normal((problem["experts"],))) / 64).astype("float32")
