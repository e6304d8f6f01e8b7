"""Routing of tokens to experts: assignment by assignment."""

from __future__ import annotations

import math

import numpy as np

from kernelcat.catalog.spec import Problem


def _sigmoid(logit):
    return 0.0 if logit == -math.inf else 1 / (1 + math.exp(-logit))


def _logits(problem: Problem, arrays):
    if not problem["product"]:
        return arrays["logits"].astype(float).tolist()
    rows = [
        [float(x @ w) for w in arrays["router"].astype(float)] for x in arrays["x"].astype(float)
    ]
    bias = arrays.get("router_bias", np.zeros(problem["experts"])).astype(float)
    return [[logit + b for logit, b in zip(row, bias, strict=True)] for row in rows]


def _keys(problem: Problem, logits, correction):
    """Expert -> (selection score, -expert) of the experts that a token may use."""
    if problem["score"] == "softmax":
        return {e: (logit, -e) for e, logit in enumerate(logits) if logit > -math.inf}
    keys = {e: (_sigmoid(logit) + correction[e], -e) for e, logit in enumerate(logits)}
    size = problem["experts"] // problem["groups"]

    def group_key(group):
        scores = sorted((keys[e][0] for e in range(group * size, (group + 1) * size)), reverse=True)
        return sum(scores[:2]), -group

    best = sorted(range(problem["groups"]), key=group_key, reverse=True)[: problem["top_groups"]]
    return {e: key for e, key in keys.items() if e // size in best}


def _weights(problem: Problem, logits, used, final):
    if problem["score"] == "softmax":
        score = [math.exp(logit - max(logits)) for logit in logits]
        total = sum(score[e] for e in used) if problem["renormalize"] else sum(score)
    else:
        score = [_sigmoid(logit) for logit in logits]
        total = sum(score[e] for e in used) + 1e-20 if problem["renormalize"] else 1.0
    return [problem["scaling"] * score[e] / total if e >= 0 else 0.0 for e in final]


def moe_route(problem: Problem, **arrays):
    """Queues of assignments, one after another."""
    tokens, experts, top_k = (problem[axis] for axis in ("tokens", "experts", "top_k"))
    logits = _logits(problem, arrays)
    correction = arrays.get("correction", np.zeros(experts)).astype(float)
    keys = [_keys(problem, row, correction) for row in logits]
    selected = [sorted(row, key=row.get, reverse=True)[:top_k] for row in keys]
    limit = tokens * top_k
    if problem["capacity_factor"]:
        limit = math.ceil(problem["capacity_factor"] * (tokens * top_k) / experts)
    served: list[list[int]] = [[] for _ in range(experts)]
    final = np.full((tokens, top_k), -1)

    def offer(proposals):
        """Serves {assignment: expert} by index; returns the assignments that are refused."""
        refused = []
        for assignment, expert in sorted(proposals.items()):
            if len(served[expert]) < limit:
                served[expert].append(assignment)
                final.flat[assignment] = expert
            else:
                refused.append(assignment)
        return refused

    unplaced = offer({t * top_k + s: e for t in range(tokens) for s, e in enumerate(selected[t])})
    while unplaced and problem["overflow"] == "reroute":
        proposals: dict[int, int] = {}
        has_room = [len(assignments) < limit for assignments in served]
        for assignment in unplaced:
            token = assignment // top_k
            taken = {e for a, e in proposals.items() if a // top_k == token} | set(final[token])
            open_to = {e: k for e, k in keys[token].items() if has_room[e] and e not in taken}
            if open_to:
                proposals[assignment] = max(open_to, key=open_to.get)
        unplaced = offer(proposals)

    order = [a for assignments in served for a in sorted(assignments)]
    position = np.full(tokens * top_k, -1)
    position[order] = np.arange(len(order))
    counts = np.array([len(assignments) for assignments in served])
    is_final = problem["overflow"] == "reroute" and problem["capacity_factor"]
    weights = [
        _weights(problem, logits[t], [e for e in final[t] if e >= 0] if is_final else selected[t],
                 final[t])
        for t in range(tokens)
    ]  # fmt: skip
    load = np.bincount([e for row in selected for e in row], minlength=experts)
    return {
        "expert_ids": final,
        "weights": np.array(weights).reshape(tokens, top_k),
        "counts": counts,
        "offsets": np.cumsum([0, *counts]),
        "order": np.array(order + [-1] * (tokens * top_k - len(order))),
        "position": position.reshape(tokens, top_k),
        **({"load": arrays["load"] + load} if problem["load"] else {}),
    }
