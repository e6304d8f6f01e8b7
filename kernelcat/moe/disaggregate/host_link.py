"""The link of engines on CPUs: pages move through memory files that both processes map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kernelcat.moe.cache import CacheLayer, KvCache
from kernelcat.moe.disaggregate.shared_cache import cache_bytes, cache_in
from kernelcat.moe.engine.pages import NULL_PAGE
from kernelcat.moe.engine.pages_out import Destination, Link, PageMoves
from kernelcat.moe.parallel.host_exchange import shared_memory
from kernelcat.ranks.rendezvous import Rendezvous

OPEN_S = 600.0
"""Seconds in which both engines must have loaded and compiled what they need."""


def agreed(meeting: Rendezvous, pages: Sequence[int]) -> list[int]:
    """The smaller number of pages of each layer group."""
    values, _ = meeting.gather(list(pages), limit_s=OPEN_S)
    return [min(counts) for counts in zip(*values, strict=True)]


class HostLink(Link):
    """Engine ``rank`` of two, which meet at the socket ``path``.

    Pages go to an inbox, which has a place for each page of the receiver's cache, and from there
    into the cache: an oracle that writes to a cache copies all of it, so nobody else may write
    there.

    Raises ``RankFailed`` if the other one does not come.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self.meeting = Rendezvous(rank, 2, path)
        self._cache = self._inbox = self._outbox = KvCache((), ())
        self._moves: Sequence[PageMoves] = ()

    def agree(self, pages: Sequence[int]) -> list[int]:
        return agreed(self.meeting, pages)

    def allocate(
        self,
        layers: Sequence[CacheLayer],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
    ) -> KvCache:
        size = cache_bytes(layers, pages, page_size, dtype)
        parts = shared_memory(self.meeting, size, OPEN_S)
        boxes = [cache_in(memory, layers, pages, page_size, dtype) for memory in parts]
        self._inbox, self._outbox = boxes[self.meeting.rank], boxes[1 - self.meeting.rank]
        self._cache = KvCache.allocate(layers, pages, page_size, dtype, "cpu")
        return self._cache

    def begin(self, moves: Sequence[PageMoves]) -> None:
        self._moves = moves

    def send(self, layer: int) -> None:
        moves = self._moves[self._cache.groups[layer]]
        _copy(self._cache, moves.sources, self._outbox, moves.dests, layer)

    def end(self) -> None:
        return None

    def receive(self, destination: Destination) -> None:
        for layer, group in enumerate(self._cache.groups):
            pages = [page for page in destination.pages[group] if page != NULL_PAGE]
            _copy(self._inbox, pages, self._cache, pages, layer)

    def synchronize(self) -> None:
        pass


def _copy(
    source: KvCache, pages: Sequence[int], dest: KvCache, dest_pages: Sequence[int], layer: int
) -> None:
    """Copies pages of a layer; in bytes, because torch copies no float8 by index."""
    for ours, theirs in zip(source.layers[layer], dest.layers[layer], strict=True):
        theirs.view(torch.uint8)[list(dest_pages)] = ours.view(torch.uint8)[list(pages)]
