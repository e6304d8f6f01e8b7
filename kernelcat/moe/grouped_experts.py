"""The experts of a layer in three launches: routing, and two products of grouped rows.

`moe_mlp` does the same in one call. Three entries are what a reader can follow: `moe_route` sorts
tokens by expert, the first `moe_gemm` gathers and activates them, the second one adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernelcat.moe.ops import activation_type, launchers_of, leaving


class Maps(NamedTuple):
    """Which expert serves which row, as `moe_route` and `moe_dispatch` tell it.

    Attributes
    ----------
    gates, position : (rows, top_k) float32 and int32
    offsets, order : int32 (experts + 1,) and (rows * top_k,)
    """

    gates: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True)
class GroupedExperts:
    """`moe_mlp` made of the entries ``route`` (`moe_route`) and ``product`` (`moe_gemm`)."""

    route: Callable[..., Any]
    product: Callable[..., Any]

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, *, w1: torch.Tensor, w2: torch.Tensor,
        top_k: int, activation: str, act_dtype: str = "bfloat16", packing: str = "rows",
        w1_scale: torch.Tensor | None = None, w2_scale: torch.Tensor | None = None,
        bias1: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
        residual: torch.Tensor | None = None, correction: torch.Tensor | None = None,
        **routing: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Arguments and result of `moe_mlp`; activations are of 16 bits, so ``act_dtype`` is x's.

        ``routing`` are axes that `moe_route` has too: renormalize, score, groups and the like.
        """
        _, gates, _, offsets, order, position, _ = self.route(
            logits, correction=correction, top_k=top_k, **routing
        )
        return self.products(
            x, Maps(gates, offsets, order, position), w1=w1, w2=w2, top_k=top_k,
            activation=activation, packing=packing, w1_scale=w1_scale, w2_scale=w2_scale,
            bias1=bias1, bias2=bias2, residual=residual,
        )  # fmt: skip

    def products(
        self, x: torch.Tensor, maps: Maps, *, w1: torch.Tensor, w2: torch.Tensor,
        top_k: int, activation: str, packing: str = "rows",
        w1_scale: torch.Tensor | None = None, w2_scale: torch.Tensor | None = None,
        bias1: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """What the experts that ``maps`` name make of the rows of x, added up by row."""
        h = self.first(
            x, maps, w1=w1, top_k=top_k, activation=activation, packing=packing, w1_scale=w1_scale,
            bias1=bias1,
        )  # fmt: skip
        return self.second(
            h, maps, w2=w2, top_k=top_k, packing=packing, w2_scale=w2_scale, bias2=bias2,
            residual=residual,
        )  # fmt: skip

    def first(
        self, x: torch.Tensor, maps: Maps, *, w1: torch.Tensor, top_k: int, activation: str,
        packing: str = "rows", w1_scale: torch.Tensor | None = None,
        bias1: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The first product of `products`: a row for each assignment."""
        h: torch.Tensor = self.product(
            x, w1, maps.offsets, maps.order, w_scale=w1_scale, bias=bias1, gather=True,
            activation=activation, tokens=len(x), top_k=top_k, packing=packing,
            dtype=activation_type(x.dtype),
        )  # fmt: skip
        return h

    def second(
        self, h: torch.Tensor, maps: Maps, *, w2: torch.Tensor, top_k: int, packing: str = "rows",
        w2_scale: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
        residual: torch.Tensor | None = None, spare: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """The second product of `products`; it leaves ``spare`` SMs to others."""
        product = leaving(self.product, spare) if spare else self.product
        y: torch.Tensor = product(
            h, w2, maps.offsets, maps.order, w_scale=w2_scale, bias=bias2, position=maps.position,
            gates=maps.gates, residual=residual, tokens=len(maps.gates), top_k=top_k,
            packing=packing, dtype=activation_type(h.dtype),
        )  # fmt: skip
        return y

    def launchers(self) -> list[Any]:
        """What `Ops.launchers` collects."""
        return launchers_of(self.route, self.product)
