"""Peers of `out_router`: torch, and its fusion by ``torch.compile``.

Both round the output projection before they add it to the residual.
"""

from __future__ import annotations

from kernelcat.errors import Unsupported
from kernelcat.reference._peers import import_torch


def _check(problem, peer: str) -> None:
    """Raises ``Unsupported`` for empty problems."""
    sizes = [problem[axis] for axis in ("tokens", "width", "hidden")]
    if 0 in sizes or (problem["has_router"] and not problem["experts"]):
        raise Unsupported(f"{peer} is not raced where a size is 0")


def _router(torch, arrays):
    """A function that computes logits from x, by one product with float32 results."""
    router, bias, logits = (arrays.get(name) for name in ("router", "router_bias", "logits"))

    def run():
        if router is not None:
            torch.mm(arrays["x"], router.t(), out_dtype=torch.float32, out=logits)
        if bias is not None:
            logits.add_(bias)

    return run


def torch_eager():
    """``linear``, ``add_``, ``rms_norm``, and the router's product."""
    torch = import_torch("torch")

    def make(problem, arrays):
        _check(problem, "torch")
        route, weight = _router(torch, arrays), arrays["norm_weight"]
        functional = torch.nn.functional

        def run():
            h = arrays["residual"]
            h.add_(functional.linear(arrays["attn"], arrays["wo"], arrays.get("bo")))
            arrays["x"].copy_(functional.rms_norm(h, weight.shape, weight, problem["eps"]))
            route()

        return run

    return make


def torch_compiled():
    """As :func:`torch_eager`, with what lies between the products fused by ``torch.compile``."""
    torch = import_torch("torch.compile")

    @torch.compile(fullgraph=True, dynamic=False)
    def normalize(projected, weight, residual, x, eps):
        h = residual + projected
        residual.copy_(h)
        h = h.float()
        result = h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps) * weight.float()
        x.copy_(result.to(x.dtype))

    def make(problem, arrays):
        _check(problem, "torch.compile")
        attn, wo, bo = (arrays.get(name) for name in ("attn", "wo", "bo"))
        named = [arrays[name] for name in ("norm_weight", "residual", "x")]
        route = _router(torch, arrays)

        def run():
            normalize(torch.nn.functional.linear(attn, wo, bo), *named, problem["eps"])
            route()

        return run

    return make
