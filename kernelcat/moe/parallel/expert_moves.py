"""Experts that change places: their weights go through memory that all ranks map.

A rank copies the weights that leave it to its part of that memory, and the others copy them from
there to their places: from GPU to GPU where ranks have GPUs. No step is in flight meanwhile; graphs
stay valid, because places keep their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from kernelcat.moe.parallel.exchange import ANSWER_S, Exchange
from kernelcat.moe.parallel.expert_layer import ARRIVED, NUM_SERVED, PLACES
from kernelcat.moe.parallel.expert_placement import Counts

NOT_MOVED = (ARRIVED, NUM_SERVED, PLACES, "correction")
"""What a layer's experts have of all ranks' experts together."""
ROOM_BYTES = 256 << 20
"""Memory of each rank through which experts move: less where all are less, more where two are."""

Experts = Mapping[str, torch.Tensor]


class ExpertMoves:
    """Moves experts between the places of a layer; all ranks make one, and call it, together.

    Parameters
    ----------
    exchange : of the ranks
    experts : this rank's experts of a layer, by argument name, each tensor (local, ...); those of
        other layers are of the same shapes

    Raises ``RankFailed`` where a rank does not answer.
    """

    def __init__(self, exchange: Exchange, experts: Experts) -> None:
        self._exchange = exchange
        tensors = _tensors(experts)
        self._local = len(tensors[0])
        self._expert_bytes = sum(row.numel() for row in _rows(tensors, 0))
        self._room = min(max(ROOM_BYTES // self._expert_bytes, 2), self._local)
        self._shared = exchange.shared_bytes(self._room * self._expert_bytes)

    def __call__(self, experts: Experts, sources: Counts) -> None:
        """Gives each place p of a layer the weights in place ``sources[p]``.

        Raises ``RankFailed`` where a rank does not answer.
        """
        tensors, rank = _tensors(experts), self._exchange.rank
        for swaps in rounds(sources, self._local, self._room):
            of_ranks: list[list[int]] = [[] for _ in self._shared]
            for place in swaps:
                of_ranks[place // self._local].append(place)
            for number, place in enumerate(of_ranks[rank]):
                for shared, row in self._shown(rank, number, tensors, place):
                    shared.copy_(row)
            self._meet()
            for place in of_ranks[rank]:
                holder = swaps[place] // self._local
                number = of_ranks[holder].index(swaps[place])
                for shared, row in self._shown(holder, number, tensors, place):
                    row.copy_(shared)
            self._meet()

    def _shown(
        self, holder: int, number: int, tensors: Sequence[torch.Tensor], place: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Expert ``number`` of what rank ``holder`` shows, beside the bytes of a place here."""
        offset = number * self._expert_bytes
        for row in _rows(tensors, place % self._local):
            yield self._shared[holder][offset : offset + row.numel()], row
            offset += row.numel()

    def _meet(self) -> None:
        """Waits until all ranks have copied what they were to copy."""
        if self._shared[0].is_cuda:
            torch.cuda.synchronize(self._shared[0].device)
        self._exchange.gather(None, ANSWER_S)


def rounds(sources: Counts, local: int, room: int) -> Iterator[dict[int, int]]:
    """Swaps that give each place p what is in place ``sources[p]``, in rounds.

    A round has the source of each of its places. It swaps pairs of places, and of each rank, which
    has ``local`` places, at most ``room``. A longer cycle takes several rounds.
    """
    left = np.array(sources)
    while (moved := np.flatnonzero(left != np.arange(len(left)))).size:
        swaps: dict[int, int] = {}
        taken = np.zeros(len(left) // local, int)
        for place in map(int, moved):
            source = int(left[place])
            if place in swaps or source in swaps:
                continue
            both = np.bincount([place // local, source // local], minlength=len(taken))
            if (taken + both > room).any():
                continue
            taken += both
            swaps |= {place: source, source: place}
        yield swaps
        left = _after(left, swaps)


def _after(sources: Counts, swaps: Mapping[int, int]) -> Counts:
    """Where what each place asks for is, after the swaps."""
    now = np.arange(len(sources))
    for place, source in swaps.items():
        now[source] = place  # what was in ``source`` is in ``place``
    return now[sources]


def _tensors(experts: Experts) -> list[torch.Tensor]:
    return [experts[name] for name in sorted(experts) if name not in NOT_MOVED]


def _rows(tensors: Sequence[torch.Tensor], index: int) -> Iterator[torch.Tensor]:
    """The bytes of expert ``index`` of each tensor (local, ...), uint8 (bytes,), to be written."""
    for tensor in tensors:
        yield tensor.view(torch.uint8)[index].view(-1)
