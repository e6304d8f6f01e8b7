"""The experts of a layer in three launches: routing, and two products of grouped rows.

`moe_mlp` does the same in one call. Three entries are what a reader can follow: `moe_route` sorts
tokens by expert, the first `moe_gemm` gathers and activates them, the second one adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelcat.moe.ops import activation_type, launchers_of


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
        shared: dict[str, Any] = {
            "tokens": len(x), "top_k": top_k, "packing": packing, "dtype": activation_type(x.dtype)
        }  # fmt: skip
        h = self.product(
            x, w1, offsets, order, w_scale=w1_scale, bias=bias1, gather=True,
            activation=activation, **shared,
        )  # fmt: skip
        y: torch.Tensor = self.product(
            h, w2, offsets, order, w_scale=w2_scale, bias=bias2, position=position, gates=gates,
            residual=residual, **shared,
        )  # fmt: skip
        return y

    def launchers(self) -> list[Any]:
        """What `Ops.launchers` collects."""
        return launchers_of(self.route, self.product)
