"""The slots of all layer groups in host memory, and copies between slots and pages.

What a page holds lies in as many tensors of the device as its group has (a layer's keys, its
values), and side by side in a slot. A copy goes through a *staging* buffer of the device: kernels
gather pages into it or scatter it to pages, and the copy engine moves it over the bus in few large
pieces. So 64 pages of gpt-oss-20b are 48 kernels and about as many copies, in place of 1,536
copies of 64 KiB.

On a GPU slots are page-locked. Memory is registered, not allocated by torch, which takes the next
power of two of any size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.moe.cache import KvCache
from kernelcat.moe.engine.host_cache import Move
from kernelcat.moe.engine.memory import GIB
from kernelcat.moe.engine.pages import NULL_PAGE

STAGING_BYTES = 64 << 20
"""Bytes of a staging buffer, if a page is not larger: 1.3 ms of a bus of 50 GB/s."""
WORD = torch.int64
"""Pages are copied as words: one byte at a time is slow."""
NUM_TRIALS = 3


def staging_bytes(page_bytes: Sequence[int]) -> int:
    """Bytes of the device that the staging buffers of both directions take."""
    return 2 * max(STAGING_BYTES, *page_bytes)


def available_bytes() -> int | None:
    """Bytes of host memory that a new process could have; None where nobody tells."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(found.split()[1]) << 10)
    with suppress(OSError, ValueError):  # a container's limit; the word max is no number
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        limits.append(int((group / "memory.max").read_text()) - used)
    return min(limits, default=None)


class GroupMemory:
    """The slots of one layer group.

    Parameters
    ----------
    tensors : the group's tensors of the device, each (pages, page_size, \\*row)
    num_slots : slots
    staging : words of the device, for copies to pages and for copies to slots

    Attributes
    ----------
    slots : (slots, words of a page) in host memory
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        num_slots: int,
        staging: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._pieces = [tensor.flatten(1).view(WORD) for tensor in tensors]
        ends = [0]
        for piece in self._pieces:
            ends.append(ends[-1] + piece.shape[1])
        self._columns = [slice(*ends) for ends in pairwise(ends)]
        self.slots = torch.empty(num_slots, ends[-1], dtype=WORD)
        rows = staging[0].numel() // ends[-1]
        self._to_pages, self._to_slots = (
            memory[: rows * ends[-1]].view(rows, ends[-1]) for memory in staging
        )

    @property
    def num_staged(self) -> int:
        """Pages that a staging buffer holds."""
        return len(self._to_pages)

    def fetch(self, moves: Sequence[Move]) -> None:
        """Copies slots to pages."""
        for part in _parts(moves, self.num_staged):
            staged, pages = self._to_pages[: len(part)], self._pages(part)
            for start, first, count in _runs(part):
                staged[start : start + count].copy_(
                    self.slots[first : first + count], non_blocking=True
                )
            for piece, columns in zip(self._pieces, self._columns, strict=True):
                piece.index_copy_(0, pages, staged[:, columns])

    def offload(self, moves: Sequence[Move]) -> None:
        """Copies pages to slots."""
        for part in _parts(moves, self.num_staged):
            staged, pages = self._to_slots[: len(part)], self._pages(part)
            for piece, columns in zip(self._pieces, self._columns, strict=True):
                torch.index_select(piece, 0, pages, out=staged[:, columns])
            for start, first, count in _runs(part):
                self.slots[first : first + count].copy_(
                    staged[start : start + count], non_blocking=True
                )

    def _pages(self, moves: Sequence[Move]) -> torch.Tensor:
        device = self._pieces[0].device
        numbers = [move.page for move in moves]
        pages = torch.tensor(numbers, pin_memory=device.type == "cuda")
        return pages.to(device, non_blocking=True)


def _parts(moves: Sequence[Move], size: int) -> list[list[Move]]:
    """Moves in the order of slots, ``size`` at a time."""
    ordered = sorted(moves, key=lambda move: move.slot)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _runs(moves: Sequence[Move]) -> list[tuple[int, int, int]]:
    """(place in ``moves``, first slot, slots) of those parts whose slots follow one another."""
    breaks = [i for i in range(1, len(moves)) if moves[i].slot != moves[i - 1].slot + 1]
    return [(a, moves[a].slot, b - a) for a, b in pairwise([0, *breaks, len(moves)])]


class HostMemory:
    """The slots of all layer groups of ``cache``, ``num_slots`` for each.

    Raises
    ------
    InvalidArgument
        The host has not so much memory, or it cannot be page-locked.
    """

    def __init__(self, cache: KvCache, num_slots: int, num_bytes: int) -> None:
        available = available_bytes()
        if available is not None and num_bytes > available:
            raise InvalidArgument(
                f"host_cache_bytes={num_bytes} are {num_bytes / GIB:.1f} GiB, and the host has "
                f"{available / GIB:.1f} GiB left"
            )
        tensors = [t for layer in cache.layers for t in layer]
        device = tensors[0].device
        groups: list[list[torch.Tensor]] = [[] for _ in set(cache.groups)]
        for layer, g in zip(cache.layers, cache.groups, strict=True):
            groups[g] += layer
        largest = max(sum(t[0].nbytes for t in group) for group in groups)
        words = max(STAGING_BYTES, largest) // WORD.itemsize
        staging = torch.empty(2, words, dtype=WORD, device=device)
        both = staging[0], staging[1]
        self.groups = [GroupMemory(group, num_slots, both) for group in groups]
        self.device = device
        self._locked: list[torch.Tensor] = []
        if device.type == "cuda":
            for memory in self.groups:
                self._lock(memory.slots)

    def _lock(self, memory: torch.Tensor) -> None:
        """Page-locks ``memory``."""
        runtime = torch.cuda.cudart()
        try:
            with torch.cuda.device(self.device):
                torch.cuda.check_error(
                    runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
                )
        except torch.cuda.CudaError as error:
            self.close()
            raise InvalidArgument(
                f"{memory.nbytes / GIB:.1f} GiB of host memory cannot be page-locked ({error}): "
                "take a smaller host cache"
            ) from error
        self._locked.append(memory)

    def fetch(self, moves: Sequence[Move]) -> None:
        """Copies slots to pages, on the current stream; the host does not wait."""
        for g, memory in enumerate(self.groups):
            memory.fetch([move for move in moves if move.group == g])

    def offload(self, moves: Sequence[Move]) -> None:
        """Copies pages to slots, on the current stream; the host does not wait."""
        for g, memory in enumerate(self.groups):
            memory.offload([move for move in moves if move.group == g])

    def measure(self) -> float:
        """Bytes a second of a fetch, the best of some trials. The null page is written with zeros.

        Called before the first block is stored, because the slots become zero, too.
        """
        group = self.groups[0]
        count = min(group.num_staged, len(group.slots))
        group.slots[:count].zero_()  # new memory may hold NaN, and the null page must not
        moves = [Move(0, NULL_PAGE, slot, b"") for slot in range(count)]
        best = float("inf")
        for _ in range(NUM_TRIALS):
            self._synchronize()
            start = time.perf_counter()
            group.fetch(moves)
            self._synchronize()
            best = min(best, time.perf_counter() - start)
        return group.slots[:count].nbytes / best

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Frees everything; no copy is on its way."""
        for memory in self._locked:
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._locked.clear()
        self.groups.clear()
