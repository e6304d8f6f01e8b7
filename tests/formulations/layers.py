"""What surrounds attention in a decoder layer, in float64 but for what is rounded by definition."""

from __future__ import annotations

import math

import numpy as np

from formulations.caches import kv_write
from formulations.products import product
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem


def rounded(problem: Problem, values):
    """``values`` rounded to the problem's dtype, in float64."""
    return dtypes.decode(dtypes.encode(values, problem["dtype"]), problem["dtype"]).astype(float)


def normalized(problem: Problem, x, weight):
    """RMSNorm row by row: the exact sum of a row's squares, then one quotient an element."""
    y, eps = np.empty(x.shape), float(np.float32(problem["eps"]))
    for row, result in zip(x.astype(float), y, strict=True):
        mean = math.fsum(row * row) / max(len(row), 1)
        result[:] = row * weight / math.sqrt(mean + eps)
    return y


def qkv_rope_write(problem: Problem, x, norm_weight, **more):
    """Head by head sums of outer products; then `kv_write`'s formulation."""
    a = rounded(problem, normalized(problem, x, norm_weight))
    for name, axis in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
        weights, bias = more.pop(f"w{name}"), more.pop(f"b{name}", None)
        more[name] = np.zeros((problem["tokens"], problem[axis], problem["head_dim"]))
        for head in range(problem[axis]):
            z = product(a, weights[head])
            more[name][:, head] = z if bias is None else z + bias[head]
    return kv_write(problem, **more)


def out_router(
    problem: Problem, attn, wo, norm_weight, residual, router=None, bo=0.0, router_bias=0.0
):
    """Sums of outer products; h and x are rounded before they are used, not as results."""
    h = product(attn, wo) + bo + residual
    x = normalized(problem, rounded(problem, h), norm_weight)
    outputs = {"residual": h, "x": x}
    if router is not None:
        outputs["logits"] = product(rounded(problem, x), router) + router_bias
    return outputs
