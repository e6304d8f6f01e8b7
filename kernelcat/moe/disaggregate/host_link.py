"""The link of engines on CPUs: each maps the other's cache, which is a memory file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from kernelcat.moe.cache import CacheLayer, KvCache
from kernelcat.moe.disaggregate.shared_cache import cache_bytes, cache_in
from kernelcat.moe.engine.pages_out import Link, PageMoves
from kernelcat.ranks.rendezvous import Rendezvous

OPEN_S = 600.0
"""Seconds in which both engines must have loaded and compiled what they need."""


def agreed(meeting: Rendezvous, pages: Sequence[int]) -> list[int]:
    """The smaller number of pages of each layer group."""
    values, _ = meeting.gather(list(pages), limit_s=OPEN_S)
    return [min(counts) for counts in zip(*values, strict=True)]


class HostLink(Link):
    """Engine ``rank`` of two, which meet at the socket ``path``.

    Raises ``RankFailed`` if the other one does not come.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self.meeting = Rendezvous(rank, 2, path)
        self._own = self._other = KvCache((), ())
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
        fd = os.memfd_create("kernelcat-cache")
        os.ftruncate(fd, size)
        _, fds = self.meeting.gather(None, fd, limit_s=OPEN_S)
        caches = []
        for each in fds:
            memory = torch.frombuffer(mmap.mmap(each, size), dtype=torch.uint8)
            os.close(each)
            caches.append(cache_in(memory, layers, pages, page_size, dtype))
        self._own, self._other = caches[self.meeting.rank], caches[1 - self.meeting.rank]
        return self._own

    def begin(self, moves: Sequence[PageMoves]) -> None:
        self._moves = moves

    def send(self, layer: int) -> None:
        moves = self._moves[self._own.groups[layer]]
        for own, other in zip(self._own.layers[layer], self._other.layers[layer], strict=True):
            other.view(torch.uint8)[moves.dests] = own.view(torch.uint8)[moves.sources]

    def end(self) -> None:
        return None

    def synchronize(self) -> None:
        pass
