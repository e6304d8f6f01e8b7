"""The experts of a mixture-of-experts layer, one token and one expert at a time in float64."""

from __future__ import annotations

import math

import numpy as np

from formulations.experts import activated, expert_weights
from formulations.products import sigmoid
from kernelcat.catalog.spec import Problem


def selected(problem: Problem, logits, correction):
    """Ids of a token's experts, best first, and their weights; ``logits`` is (experts,)."""
    size = problem["experts"] // problem["groups"]
    scores = [float(logit) for logit in logits]
    if problem["score"] == "sigmoid":
        scores = [sigmoid(s) + float(c) for s, c in zip(scores, correction, strict=True)]

    def group_score(group: int) -> float:
        return sum(sorted(scores[group * size : (group + 1) * size])[-2:])

    groups = sorted(range(problem["groups"]), key=lambda g: (-group_score(g), g))
    allowed = [e for g in groups[: problem["top_groups"]] for e in range(g * size, (g + 1) * size)]
    ids = sorted(allowed, key=lambda e: (-scores[e], e))[: problem["top_k"]]
    if problem["score"] == "sigmoid":
        parts = {e: sigmoid(float(logits[e])) for e in range(problem["experts"])}
    else:
        parts = {e: math.exp(logit - max(logits)) for e, logit in enumerate(logits)}
    whole = 1.0
    if problem["renormalize"]:
        whole = sum(parts[e] for e in ids) + 1e-20 * (problem["score"] == "sigmoid")
    elif problem["score"] == "softmax":
        whole = sum(parts.values())
    return ids, [problem["scaling"] * parts[e] / whole for e in ids]


def moe_mlp(
    problem: Problem, x, logits, w1, w2, correction=None, residual=None, w1_scale=None,
    w1_global_scale=None, bias1=None, w2_scale=None, w2_global_scale=None, bias2=None,
):  # fmt: skip
    """Nothing is rounded: neither h nor, in float8, what is multiplied."""
    hidden, inter, experts = problem["hidden"], problem["inter"], problem["experts"]
    correction = np.zeros(experts) if correction is None else correction
    out = np.zeros((problem["tokens"], hidden))
    if residual is not None:
        out += residual

    def product(row, expert, n, k, w, scale, global_scale, bias):
        stored = [array if array is None else array[expert] for array in (scale, global_scale)]
        weights = expert_weights(problem.values, n, k, w[expert], *stored)
        z = (weights * row).sum(axis=1)
        return z if bias is None else z + bias[expert]

    for token in range(problem["tokens"]):
        for expert, weight in zip(*selected(problem, logits[token], correction), strict=True):
            first = (w1, w1_scale, w1_global_scale, bias1)
            z = product(x[token].astype("float64"), expert, 2 * inter, hidden, *first)
            h = activated(problem["activation"], z)
            second = (w2, w2_scale, w2_global_scale, bias2)
            out[token] += weight * product(h, expert, hidden, inter, *second)
    return {"out": out}
