"""Peers of `rms_norm`: torch, its fusion by ``torch.compile``, and FlashInfer.

Peers normalize in an order of sums of their own, so their results differ in the last bit.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import import_flashinfer
from kernelcat.reference._fp8 import BLOCK, MIN_AMAX
from kernelcat.reference._peers import import_torch


def _check(problem, peer: str, formats: tuple[str, ...]) -> None:
    """Raises ``Unsupported`` for empty problems and other output formats."""
    if problem["M"] * problem["N"] == 0:
        raise Unsupported(f"{peer} is not raced where M or N is 0")
    if problem["out_format"] not in formats:
        raise Unsupported(f"{peer} is raced with out_format {' or '.join(formats)}")


def torch_norm():
    """``add_`` where there is a residual, then ``rms_norm``."""
    torch = import_torch("torch")

    def make(problem, arrays):
        _check(problem, "torch", ("same",))
        x, weight, y = (arrays[name] for name in ("x", "weight", "y"))

        def run():
            h = arrays["residual"].add_(x) if problem["residual"] else x
            y.copy_(torch.nn.functional.rms_norm(h, weight.shape, weight, problem["eps"]))

        return run

    return make


def torch_compiled():
    """The definition in torch's operators, fused by ``torch.compile``; h is rounded as by them."""
    torch = import_torch("torch.compile")

    # Without the option a fusion keeps h in float32, and misses the tolerance of float8.
    @torch.compile(fullgraph=True, dynamic=False, options={"emulate_precision_casts": True})
    def run(x, weight, residual, y, q, scale, eps):
        h = x if residual is None else x + residual
        if residual is not None:
            residual.copy_(h)
        h = h.float()
        result = h * torch.rsqrt(h.square().mean(1, keepdim=True) + eps) * weight.float()
        if y is not None:
            y.copy_(result.to(y.dtype))
            return
        blocks = result.unflatten(1, (-1, BLOCK))
        amax = blocks.abs().amax(2).clamp_min(MIN_AMAX)
        q.copy_((blocks * (dtypes.E4M3_MAX / amax)[:, :, None]).view_as(q).to(q.dtype))
        scale.copy_((amax / dtypes.E4M3_MAX).t())

    def make(problem, arrays):
        _check(problem, "torch.compile", ("same", "fp8"))
        if problem["out_format"] == "fp8" and problem["N"] % BLOCK:
            raise Unsupported(f"torch.compile is raced with fp8 where N is a multiple of {BLOCK}")
        named = [arrays.get(name) for name in ("x", "weight", "residual", "y", "q", "scale")]
        return lambda: run(*named, problem["eps"])

    return make


def flashinfer_norm():
    """``fused_add_rmsnorm``, which writes the result over x, or ``rmsnorm``."""
    flashinfer = import_flashinfer()

    def make(problem, arrays):
        _check(problem, "flashinfer", ("same",))
        x, weight, y, eps = (*(arrays[name] for name in ("x", "weight", "y")), problem["eps"])
        if problem["residual"]:
            raise Unsupported("fused_add_rmsnorm overwrites x, so it is not raced with a residual")
        return lambda: flashinfer.norm.rmsnorm(x, weight, eps, out=y)

    return make
