"""A step's arrays on the host and on the device: memory of the same layout, one copy a step."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from kernelcat.moe.batch import Batch
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.step import Step
from kernelcat.moe.engine.step_arrays import Array, StepArrays
from kernelcat.moe.engine.step_sizes import Size, StepSizes

ALIGNMENT = 256
"""Bytes that the address of each array is a multiple of."""


class HostArena:
    """Host memory from which arrays are cut one after another; pinned for a GPU."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._bytes = self.tensor.numpy()
        self.end = 0

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An array of zeros."""
        start, num_bytes = self.end, array_bytes(shape, dtype)
        self.end = start + num_bytes
        used = self._bytes[start : start + prod(shape) * np.dtype(dtype).itemsize]
        return used.view(dtype).reshape(shape)

    def offset(self, array: Array) -> int:
        """Bytes before ``array``, which is in this memory."""
        return int(array.ctypes.data) - int(self._bytes.ctypes.data)


def array_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes that an array takes, up to the next multiple of `ALIGNMENT`."""
    return -(-prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT


class HostStep:
    """The arrays of a step on the host.

    Attributes
    ----------
    arrays : in ``arena``
    chosen : int32 (rows,) room for the tokens that the step before has chosen; on the device they
        lie before the step's own tokens, so one gather finds both
    """

    def __init__(self, manager: BlockManager, sizes: StepSizes, is_pinned: bool) -> None:
        needed = 0

        def count(shape: tuple[int, ...], dtype: str) -> Array:
            nonlocal needed
            needed += array_bytes(shape, dtype)
            return np.empty(shape, dtype)

        rows = (sizes.largest.rows,)
        count(rows, "int32")
        StepArrays(manager, sizes, count)
        self.arena = HostArena(needed, is_pinned)
        self.chosen = self.arena.allocate(rows, "int32")
        self.arrays = StepArrays(manager, sizes, self.arena.allocate)

    def fill(self, step: Step, size: Size) -> None:
        """Writes the step; source rows become places in ``chosen`` and in the tokens after it."""
        self.arrays.fill(step, size)
        sources = self.arrays.source_rows
        own = self.arena.offset(self.arrays.tokens) // 4 + np.arange(len(sources), dtype=np.int32)
        sources[:] = np.where(sources >= 0, sources, own)


class DeviceStep:
    """The device's copy of a `HostStep`: one piece of memory with the same layout.

    All steps use this memory, one after another on one stream.
    """

    def __init__(self, like: HostStep, device: torch.device) -> None:
        self.memory = torch.zeros_like(like.arena.tensor, device=device)
        tokens_end = like.arena.offset(like.arrays.tokens) + like.arrays._by_token["tokens"].nbytes
        self.known = self.memory[:tokens_end].view(torch.int32)
        """Tokens that the step before has chosen, then this step's tokens."""
        self.chosen = self.known[: len(like.chosen)]
        self._first = like.arena.offset(like.arrays.tokens)

    def copy(self, host: HostStep) -> None:
        """Copies what the step uses from pinned memory; the host does not wait."""
        tables = host.arrays.block_tables
        self._copy(host, self._first, host.arena.offset(tables[0]))
        for table in tables:
            start = host.arena.offset(table)
            self._copy(host, start, start + table.nbytes)

    def _copy(self, host: HostStep, start: int, end: int) -> None:
        self.memory[start:end].copy_(host.arena.tensor[start:end], non_blocking=True)

    def view(self, host: HostStep, name: str) -> torch.Tensor:
        """The device's tensor of the array called ``name``, in the size of the step."""
        return self._view(host, getattr(host.arrays, name))

    def _view(self, host: HostStep, array: Array) -> torch.Tensor:
        start, dtype = host.arena.offset(array), getattr(torch, str(array.dtype))
        flat = self.memory[start : start + array.nbytes].view(dtype)
        return flat.view(array.shape)

    def batch(self, host: HostStep) -> Batch:
        """The model's batch; its tokens are gathered on the device."""
        views: dict[str, Any] = {
            name: self.view(host, name) for name in ("positions", "kv_lens", "cu_q", "rows")
        }
        return Batch(
            tokens=self.known.index_select(0, self.view(host, "source_rows")),
            block_tables=tuple(self._view(host, table) for table in host.arrays.block_tables),
            max_q=host.arrays.size.max_q,
            **views,
        )
