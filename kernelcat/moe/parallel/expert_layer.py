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

Many tokens go in two halves (`Halves`): the second half travels to its experts beside the first
half's product with W2, and the first half's sums travel back beside the second half's. Halves
change no sum, since each row is computed by itself.

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
from kernelcat.moe.parallel.exchange import Dispatched, Exchange
from kernelcat.moe.parallel.halves import EXPERT_SMS, Halves

PLACES, ARRIVED, NUM_SERVED = "places", "arrived", "num_served"
"""Names in a layer's experts: int32 (experts,) the place of each expert, absent while expert e is
in place e; and the layer's rows of `StepCounts`, (local + 1,) each."""


@dataclass(frozen=True)
class StepCounts:
    """What the places of a rank have served, which each step adds up in one launch.

    Differences of neighbours count the assignments of a place.

    Attributes
    ----------
    arrived : int32 (layers, columns), the offsets of the rows that came to each layer in this step,
        or in its first half; columns beyond the offsets are 0
    num_served : int64 (layers, columns), their sums
    """

    arrived: torch.Tensor
    num_served: torch.Tensor

    def end_step(self) -> None:
        """Counts what has arrived in all layers."""
        self.num_served.add_(self.arrived)


@dataclass(frozen=True)
class DividedExperts:
    """What `Decoder.divided` is: the experts of a layer, whose weights ranks hold in parts.

    Attributes
    ----------
    exchange : with the other ranks
    grouped : the entries `moe_route` and `moe_gemm`
    beside : runs what needs no exchange while rows are on their way
    counts : those of all layers; None where nobody counts
    """

    exchange: Exchange
    grouped: GroupedExperts
    beside: Beside
    counts: StepCounts | None = None

    def __call__(
        self, a: torch.Tensor, logits: torch.Tensor | None, experts: Mapping[str, torch.Tensor],
        x: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        is_added: torch.Tensor | None = None, halves: Halves | None = None, *,
        top_k: int, activation: str, act_dtype: str, packing: str = "rows", **routing: Any,
    ) -> torch.Tensor:  # fmt: skip
        """x + the weighted sums of all experts of the rows of a (tokens, hidden).

        Parameters
        ----------
        experts : weights of the places that this rank holds, by argument name, and what `PLACES`,
            `ARRIVED` and `NUM_SERVED` name
        shared : what a shared expert makes of x, beside the others; None without one
        is_added : bool (tokens, 1), tokens that no expert serves; None for none
        halves : divides many tokens; None for never
        routing : axes of `moe_route`
        """
        weights = dict(experts)
        places = weights.pop(PLACES, None)
        arrived, num_served = weights.pop(ARRIVED, None), weights.pop(NUM_SERVED, None)
        ids, gates, *_ = self.grouped.route(
            logits, correction=weights.pop("correction", None), top_k=top_k, **routing
        )
        if places is not None:
            ids = places.index_select(0, ids.flatten()).view_as(ids)
        if is_added is not None:
            ids.masked_fill_(is_added, -1)
        # Behind the router, with the dispatch: before it, these products would take all SMs first.
        residual = None if shared is None else self.beside.start(partial(shared, x))
        parts = _Parts(
            self, a, ids, gates, arrived, num_served,
            {"top_k": top_k, "packing": packing},
            {"activation": activation, **_named(weights, "1")}, _named(weights, "2"),
        )  # fmt: skip
        if halves is not None and (first := halves.first(len(a))):
            return self._in_halves(parts, halves, first, x, residual)
        whole = slice(None)
        came = parts.dispatch(whole)
        sums = parts.second(parts.first(came), came)
        return parts.combine(whole, sums, came, x if residual is None else residual())

    def _in_halves(
        self,
        parts: _Parts,
        halves: Halves,
        first: int,
        x: torch.Tensor,
        residual: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        """The layer whose first half has ``first`` tokens.

        What one stream has made and the other one reads has a name here, and so lives until both
        have met.
        """
        early, late = slice(first), slice(first, None)
        spare = halves.spare(EXPERT_SMS)
        out = torch.empty_like(x)
        came = parts.dispatch(early)
        h = parts.first(came)
        mark = halves.beside.mark()
        sums = parts.second(h, came, spare)
        later_came = halves.start(partial(parts.dispatch, late), EXPERT_SMS, mark)()
        later_h = parts.first(later_came)
        x = x if residual is None else residual()
        mark = halves.beside.mark()
        later_sums = parts.second(later_h, later_came, spare)
        halves.start(partial(parts.combine, early, sums, came, x, out), EXPERT_SMS, mark)()
        parts.combine(late, later_sums, later_came, x, out)
        return out

    def end_step(self) -> None:
        """All layers of a step have been launched."""
        if self.counts is not None:
            self.counts.end_step()

    def launchers(self) -> list[Any]:
        """What `Decoder.launchers` collects."""
        return launchers_of(self.grouped, self.exchange)


@dataclass(frozen=True)
class _Parts:
    """The steps of a layer for some of its tokens, which ``tokens`` selects.

    ``weights1`` and ``weights2`` are arguments of the two products by name, ``shared`` those of
    both.
    """

    layer: DividedExperts
    a: torch.Tensor
    ids: torch.Tensor
    gates: torch.Tensor
    arrived: torch.Tensor | None
    num_served: torch.Tensor | None
    shared: Mapping[str, Any]
    weights1: Mapping[str, Any]
    weights2: Mapping[str, Any]

    @property
    def local(self) -> int:
        return len(self.weights1["w1"])

    def dispatch(self, tokens: slice) -> Dispatched:
        """What comes of the tokens of all ranks; a second half is counted at once."""
        is_second = bool(tokens.start)
        came = self.layer.exchange.dispatch(
            self.a[tokens], self.ids[tokens], self.gates[tokens], self.local,
            offsets=None if is_second else self.arrived,
        )  # fmt: skip
        if is_second and self.num_served is not None:
            self.num_served.add_(came.offsets)
        return came

    def first(self, came: Dispatched) -> torch.Tensor:
        return self.layer.grouped.first(came.rows, _maps(came), **self.weights1, **self.shared)

    def second(self, h: torch.Tensor, came: Dispatched, spare: int = 0) -> torch.Tensor:
        return self.layer.grouped.second(
            h, _maps(came), **self.weights2, **self.shared, spare=spare
        )

    def combine(
        self,
        tokens: slice,
        sums: torch.Tensor,
        came: Dispatched,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x + the sums, for the rows of x and of ``out`` that are the tokens."""
        return self.layer.exchange.combine(
            sums, came.row_of, self.ids[tokens], self.local, x[tokens],
            None if out is None else out[tokens],
        )  # fmt: skip


def _maps(came: Dispatched) -> Maps:
    return Maps(came.gates, came.offsets, came.order, came.position)


def _named(weights: Mapping[str, torch.Tensor], number: str) -> dict[str, torch.Tensor]:
    """Those of ``weights`` that product ``number`` takes: w1, w1_scale, bias1."""
    return {name: w for name, w in weights.items() if number in name}
