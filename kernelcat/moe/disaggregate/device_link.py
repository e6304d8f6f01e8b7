"""The link of engines on GPUs: `kv_transfer` from one cache to the other, layer by layer.

A stream of its own sends the pages of a layer as soon as the layer has been computed, while later
layers are. Lists of pages are padded, so that few launches are prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.moe.cache import CacheLayer, KvCache
from kernelcat.moe.disaggregate.host_link import agreed
from kernelcat.moe.disaggregate.shared_cache import cache_bytes, cache_in
from kernelcat.moe.engine.pages_out import Destination, Link, PageMoves
from kernelcat.moe.engine.streams import DeviceStream, Event
from kernelcat.ranks.group import Group
from kernelcat.reference.kv_transfer import CACHES
from kernelcat.runtime.device import Bind, CudaDevice, Run

COUNTS = (16, 64, 256, 1024)
"""Lengths to which lists of pages are padded; a longer list takes several launches."""
CONFIG = Config(unroll=4, blocks=16)
"""Few thread blocks: a layer's pages take far less time than a layer, which needs the SMs."""
LISTS = ("source_pages", "dest_ranks", "dest_pages")


class DeviceLink(Link):
    """Engine ``rank`` of two, which meet at the socket ``path``, on this process's first GPU.

    Raises ``RankFailed`` if the other one does not come, or its GPU cannot be reached.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self.group = Group(rank, 2, path, CudaDevice(0))
        self._stream = DeviceStream(torch.device("cuda", 0))
        assert self._stream.cuda is not None
        self._current = self.group.xp.cuda.ExternalStream(self._stream.cuda.cuda_stream)
        self._cache = KvCache((), ())
        self._binds: dict[tuple[Any, ...], Bind] = {}
        self._lists: dict[tuple[int, int, int], torch.Tensor] = {}
        self._runs: dict[tuple[int, int, int], Run] = {}
        self._parts: list[list[int]] = []
        self._last: Event = None

    def agree(self, pages: Sequence[int]) -> list[int]:
        return agreed(self.group.rendezvous, pages)

    def allocate(
        self,
        layers: Sequence[CacheLayer],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
    ) -> KvCache:
        torch.cuda.empty_cache()  # the driver gives what torch has kept
        shared = self.group.share(cache_bytes(layers, pages, page_size, dtype))
        self._cache = cache_in(torch.from_dlpack(shared), layers, pages, page_size, dtype)
        for layer in range(len(layers)):
            for count in COUNTS:
                self._bind(layer, count)
        return self._cache

    def begin(self, moves: Sequence[PageMoves]) -> None:
        self._parts = []
        for group, move in enumerate(moves):
            parts = list(padded(move, 1 - self.group.rank))
            self._parts.append([len(part[0]) for part in parts])
            for number, part in enumerate(parts):
                self._stream.run(partial(self._fill, group, number, part))

    def _fill(self, group: int, number: int, part: Sequence[list[int]]) -> None:
        """Writes list ``number`` of a group of layers, behind what reads the list before."""
        values = torch.tensor(part, dtype=torch.int32).pin_memory()
        self._list(group, number, values.shape[1]).copy_(values, non_blocking=True)

    def _list(self, group: int, number: int, count: int) -> torch.Tensor:
        """Device memory for list ``number`` of ``count`` entries, int32 (3, count)."""
        key = group, number, count
        if key not in self._lists:
            self._lists[key] = torch.empty(3, count, dtype=torch.int32, device=self._stream.device)
        return self._lists[key]

    def send(self, layer: int) -> None:
        computed = torch.cuda.current_stream(self._stream.device).record_event()
        for number, count in enumerate(self._parts[self._cache.groups[layer]]):
            key = layer, number, count
            if key not in self._runs:
                self._runs[key] = self._run(*key)
            with self._current:
                self._last = self._stream.run(self._runs[key], computed)

    def _run(self, layer: int, number: int, count: int) -> Run:
        """The launch that sends list ``number`` of the group that ``layer`` belongs to."""
        lists = self._list(self._cache.groups[layer], number, count)
        arrays = dict(zip(LISTS, lists, strict=True))
        arrays |= zip(CACHES, self._cache.layers[layer], strict=False)
        as_array = self.group.xp.from_dlpack
        return self._bind(layer, count)(
            {name: as_array(tensor.view(torch.uint8)) for name, tensor in arrays.items()}
        )

    def _bind(self, layer: int, count: int) -> Bind:
        """`kv_transfer` of lists of ``count`` entries; compiled once for equal layers."""
        tensors = self._cache.layers[layer]
        pages, page_size, *row = tensors[0].shape
        sizes = {"count": count, "pages": pages, "page_size": page_size, "row": prod(row)}
        key = *sizes.values(), len(tensors)
        if key not in self._binds:
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            problem = catalog.entry("kv_transfer").problem(
                **sizes, caches=len(tensors), ranks=2, dtype=dtype
            )
            kernel = catalog.implementation("kv_transfer", "cuda", "vectors")
            self._binds[key] = self.group.load_alone(kernel, problem, CONFIG)
        return self._binds[key]

    def end(self) -> Event:
        return self._last

    def receive(self, destination: Destination) -> None:
        """Nothing: the other GPU has written into this one's cache."""

    def synchronize(self) -> None:
        self._stream.synchronize()


def padded(move: PageMoves, rank: int) -> Iterator[tuple[list[int], ...]]:
    """The lists of launches that send ``move`` to ``rank``: sources, ranks, and pages there."""
    for first in range(0, len(move.sources), COUNTS[-1]):
        part = slice(first, first + COUNTS[-1])
        sources, dests = move.sources[part], move.dests[part]
        rest = next(count for count in COUNTS if count >= len(sources)) - len(sources)
        padding = [-1] * rest
        yield sources + padding, [rank] * len(sources) + padding, dests + padding
