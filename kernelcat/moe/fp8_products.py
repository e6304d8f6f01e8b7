"""Products in float8 with weights that a model has in 16 bits: attention's projections, the head.

Weights get float8 copies with a scale for each 128 x 128 elements; activations are quantized where
they are multiplied, with a scale for each row and 128 columns. `fp8_quantize` makes both,
`fp8_gemm` multiplies, and the result has 16 bits. Queries and keys are multiplied by `paged_attn`
in 16 bits, whatever the cache has.

A model that is quantized so gives other logits: `divergence` says how far they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from kernelcat.moe.blocks import Projections
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import Ops, launchers_of
from kernelcat.reference._epilogue import torch_activation

Call = Callable[..., Any]


class Fp8Gemm:
    """`gemm` that multiplies some weights in float8, and all others as it did.

    Parameters
    ----------
    ops : entries, of which ``fp8_quantize`` and ``gemm`` are used
    product : the entry `fp8_gemm`
    weights : (N, K) in 16 bits; a call is told by the address of its weights, so they must stay
    """

    def __init__(self, ops: Ops, product: Call, weights: Iterable[torch.Tensor]) -> None:
        self.gemm, self.quantize, self.product = ops.gemm, ops.fp8_quantize, product
        self._copies = {
            weight.data_ptr(): (weight, *ops.fp8_quantize(weight, block="128x128"))
            for weight in weights
        }

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        activation: str = "none",
    ) -> torch.Tensor:
        """activation(a b^T + bias) + residual; what follows the product is torch's."""
        weight, codes, scale = self._copies.get(b.data_ptr(), (None, None, None))
        if weight is None or weight.shape != b.shape:
            plain: torch.Tensor = self.gemm(a, b, bias, residual, activation=activation)
            return plain
        d = self.product(*self.quantize(a, block="1x128"), codes, scale).to(a.dtype)
        d = d if bias is None else d + bias
        d = torch_activation(activation)(d)
        return d if residual is None else d + residual

    def launchers(self) -> list[Any]:
        """What `Ops.launchers` collects."""
        return launchers_of(self.gemm, self.product, self.quantize)


class Fp8Head:
    """`lm_head` in float8: logits of 16 bits are stored, and torch finds the largest ones."""

    def __init__(self, ops: Ops, product: Call, head: torch.Tensor) -> None:
        self.gemm = Fp8Gemm(ops, product, [head])

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, *, top_k: int = 1, has_logits: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The largest logits, their tokens, and all logits where ``has_logits``."""
        logits = self.gemm(x, w)
        values, ids = logits.topk(top_k, 1)
        return values.float(), ids.int(), logits.float() if has_logits else None

    def launchers(self) -> list[Any]:
        """What `Ops.launchers` collects."""
        return self.gemm.launchers()


def projections(layer: Any) -> list[torch.Tensor]:
    """The weights (N, K) by which attention of ``layer`` multiplies the residual stream."""
    found = [layer.out.weight]
    if isinstance(getattr(layer, "qkv", None), Projections):
        return found + [weight.flatten(0, 1) for weight in layer.qkv.weights]
    latent = layer.latent
    return found + [w for w in (latent.wq_a, latent.wq_b, latent.wc, latent.wk_pe) if w is not None]


def with_projections(ops: Ops, model: Decoder, product: Call) -> Ops:
    """``ops`` that multiply attention's projections of ``model`` in float8.

    Fused projections are switched off: `qkv_rope_write` and `out_router` take 16 bits.
    """
    weights = [weight for layer in model.layers for weight in projections(layer)]
    gemm = Fp8Gemm(ops, product, weights)
    return replace(ops, gemm=gemm, fused_tokens=0, projected_tokens=0)


def with_head(ops: Ops, model: Decoder, product: Call) -> Ops:
    """``ops`` that multiply the head of ``model`` in float8."""
    return replace(ops, lm_head=Fp8Head(ops, product, model.head))
