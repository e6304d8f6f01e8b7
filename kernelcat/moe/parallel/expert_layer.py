"""The experts of a layer, divided among ranks: expert parallelism.

Each rank has tokens of its own and holds as many experts as each other rank, in numbered *places*:
rank r holds the places r * local to (r + 1) * local - 1. For its tokens a rank computes

    ids, gates = the experts of each token and their weights          `moe_route`
    rows come to the ranks that hold their experts                    `moe_dispatch`
    h = activation(rows @ W1[e]^T + bias1[e])                         `moe_gemm`
    sums[i] = sum over row i's experts here of gates * (h @ W2[e]^T + bias2[e])
    out[t] = residual[t] + the sums of token t, rank after rank       `moe_combine`

So a token's sum has a fixed order that follows from where its experts are: the slots of a rank from
left to right, then the ranks. Experts that move may change the last bits, other requests cannot.
Tokens that were added to fill a size come to no rank.

Source: Lepikhin et al., "GShard", 2020; DeepSeek-AI, "DeepSeek-V3 technical report", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernelcat.moe.grouped_experts import GroupedExperts, Maps
from kernelcat.moe.ops import launchers_of
from kernelcat.moe.parallel.beside import Beside
from kernelcat.moe.parallel.exchange import Exchange

PLACES, NUM_SERVED = "places", "num_served"
"""Names in a layer's experts: int32 (experts,) the place of each expert, absent while expert e is
in place e; int64 (local + 1,) to which each step adds the offsets of the rows that came, so that
differences count the assignments that each place has served."""


@dataclass(frozen=True)
class DividedExperts:
    """What `Decoder.divided` is: the experts of a layer, whose weights ranks hold in parts.

    Attributes
    ----------
    exchange : with the other ranks
    grouped : the entries `moe_route` and `moe_gemm`
    beside : runs what needs no exchange while rows are on their way
    """

    exchange: Exchange
    grouped: GroupedExperts
    beside: Beside

    def __call__(
        self, a: torch.Tensor, logits: torch.Tensor | None, experts: Mapping[str, torch.Tensor],
        x: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        is_added: torch.Tensor | None = None, *,
        top_k: int, activation: str, act_dtype: str, packing: str = "rows", **routing: Any,
    ) -> torch.Tensor:  # fmt: skip
        """x + the weighted sums of all experts of the rows of a (tokens, hidden).

        Parameters
        ----------
        experts : weights of the places that this rank holds, by argument name, and what `PLACES`
            and `NUM_SERVED` name
        shared : what a shared expert makes of x, beside the others; None without one
        is_added : bool (tokens, 1), tokens that no expert serves; None for none
        routing : axes of `moe_route`
        """
        weights = dict(experts)
        places, num_served = weights.pop(PLACES, None), weights.pop(NUM_SERVED, None)
        residual = None if shared is None else self.beside.start(partial(shared, x))
        ids, gates, *_ = self.grouped.route(
            logits, correction=weights.pop("correction", None), top_k=top_k, **routing
        )
        if places is not None:
            ids = places.index_select(0, ids.flatten()).view_as(ids)
        if is_added is not None:
            ids = ids.masked_fill(is_added, -1)
        local = len(weights["w1"])
        came = self.exchange.dispatch(a, ids, gates, local)
        if num_served is not None:
            num_served += came.offsets
        sums = self.grouped.products(
            came.rows, Maps(came.gates, came.offsets, came.order, came.position),
            top_k=top_k, activation=activation, packing=packing, **weights,
        )  # fmt: skip
        x = x if residual is None else residual()
        return self.exchange.combine(sums, came.row_of, ids, local, x)

    def launchers(self) -> list[Any]:
        """What `Decoder.launchers` collects."""
        return launchers_of(self.grouped, self.exchange)
