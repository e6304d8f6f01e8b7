"""Peers of `moe_route`: torch's operators, and the top-k of OpenAI's `triton_kernels`.

Both select other experts where scores are equal, so only their weights are compared.
"""

from __future__ import annotations

from kernelcat.errors import Unsupported
from kernelcat.reference._peers import import_torch
from kernelcat.reference._triton_kernels import load


def _selection_scores(torch, problem, scores, correction):
    """Scores of sigmoid with correction, -inf outside of the best groups."""
    if correction is not None:
        scores = scores + correction
    if problem["top_groups"] >= problem["groups"]:
        return scores
    grouped = scores.unflatten(1, (problem["groups"], -1))
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    limited = torch.ones_like(best, dtype=torch.bool)
    limited.scatter_(1, best.topk(problem["top_groups"], -1).indices, False)
    return grouped.masked_fill(limited[..., None], -torch.inf).flatten(1)


def _route(torch, problem, arrays):
    """Ids (tokens, top_k) int64 and weights (tokens, top_k) before the capacity limit."""
    logits = arrays.get("logits")
    if logits is None:
        logits = torch.nn.functional.linear(
            arrays["x"], arrays["router"], arrays.get("router_bias")
        )
    logits, top_k = logits.float(), problem["top_k"]
    if problem["score"] == "softmax":
        values, ids = logits.topk(top_k)
        if problem["renormalize"]:
            return ids, values.softmax(-1) * problem["scaling"]
        return ids, (values - logits.logsumexp(-1, True)).exp() * problem["scaling"]
    scores = logits.sigmoid()
    ids = _selection_scores(torch, problem, scores, arrays.get("correction")).topk(top_k).indices
    weights = scores.gather(1, ids)
    if problem["renormalize"]:
        weights = weights / (weights.sum(-1, True) + 1e-20)
    return ids, weights * problem["scaling"]


def _check(problem, peer):
    if problem["capacity_factor"] or problem["load"]:
        raise Unsupported(f"{peer} is raced without a capacity limit and without load")
    if not problem["tokens"]:
        raise Unsupported(f"{peer} is not raced without tokens")


def torch_route():
    """What a program without a fused router runs: top-k, softmax, sort and prefix sums."""
    torch = import_torch("torch")

    def make(problem, arrays):
        _check(problem, "torch")
        flat, ones = arrays["expert_ids"].view(-1), torch.ones_like(arrays["order"])
        places = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)

        def run():
            ids, weights = _route(torch, problem, arrays)
            arrays["expert_ids"].copy_(ids)
            arrays["weights"].copy_(weights)
            order = flat.argsort(stable=True)
            arrays["order"].copy_(order)
            arrays["position"].view(-1).scatter_(0, order, places)
            arrays["counts"].zero_().scatter_add_(0, ids.view(-1), ones)
            arrays["offsets"][:1].zero_()  # a graph cannot capture a copy of a Python number
            torch.cumsum(arrays["counts"], 0, dtype=torch.int32, out=arrays["offsets"][1:])

        return run

    return make


def tokenspeed_route():
    """The top-k of `triton_kernels`: weights, ids and a bit matrix in one launch, then the maps."""
    load()
    from triton_kernels.topk import topk

    def make(problem, arrays):
        _check(problem, "tokenspeed")
        if problem["score"] != "softmax" or not problem["renormalize"] or problem["product"]:
            raise Unsupported("tokenspeed is raced on given logits, with renormalized softmax")
        if problem["dtype"] != "float32" or problem["top_k"] & (problem["top_k"] - 1):
            raise Unsupported("tokenspeed's weights are float32 if logits are; 2^n experts a token")

        def run():
            sparse = topk(arrays["logits"], problem["top_k"])
            arrays["weights"].copy_(sparse.vals)
            arrays["expert_ids"].copy_(sparse.indx)
            arrays["counts"].copy_(sparse.mask_metadata.col_sum)
            arrays["order"].copy_(sparse.mask_metadata.col_sorted_indx)

        return run

    return make
