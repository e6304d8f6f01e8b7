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
    """Host memory, uint8 (bytes,), from which arrays are cut one after another."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory.numpy()
        self.end = 0

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """The next array, of zeros if the memory is."""
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


class StepBuffers:
    """The arrays of a step in pinned memory, and the device's copy of them.

    Steps in flight use such buffers in turn, so a step is copied to the device while the step
    before it runs. A graph keeps addresses, so it belongs to one of them.

    Attributes
    ----------
    arrays : on the host
    chosen : int32 (rows,) the tokens that the step chooses, on the device
    results : the same on the host, complete when the step has been collected
    """

    def __init__(
        self, index: int, manager: BlockManager, sizes: StepSizes, host: torch.Tensor,
        device: torch.Tensor,
    ) -> None:  # fmt: skip
        """``host`` and ``device`` are the memory of all buffers, uint8 (buffers, bytes)."""
        arena = HostArena(host[index])
        self._host, self._device, self._offset = host[index], device[index], arena.offset
        results = arena.allocate((sizes.largest.rows,), "int32")
        self._first = arena.end
        self.arrays = StepArrays(manager, sizes, arena.allocate)
        self.results, self.chosen = (
            memory[: results.nbytes].view(torch.int32) for memory in (self._host, self._device)
        )
        self._tokens = device.view(torch.int32).flatten()
        # Places in it, of the first token of this step and of the first one that the last one chose
        self._own = (index * device.shape[1] + self._offset(self.arrays.tokens)) // 4
        self._before = (index - 1) % len(device) * device.shape[1] // 4

    def fill(self, step: Step, size: Size) -> None:
        """Writes the step; source rows become places in the memory of all buffers."""
        self.arrays.fill(step, size)
        sources = self.arrays.source_rows
        own = self._own + np.arange(len(sources), dtype=np.int32)
        sources[:] = np.where(sources >= 0, self._before + sources, own)

    def _used(self) -> slice:
        """The bytes that the step uses."""
        last = self.arrays.block_tables[-1]
        return slice(self._first, self._offset(last) + last.nbytes)

    def written(self) -> bytes:
        """What the step uses, for `write` of other buffers."""
        return self._host[self._used()].numpy().tobytes()

    def write(self, size: Size, data: bytes) -> None:
        """Writes a step of ``size``; ``data`` is what other buffers of the same sizes had."""
        self.arrays.show(size)
        self._host[self._used()].numpy()[:] = np.frombuffer(data, np.uint8)

    def copy_in(self) -> None:
        """Copies what the step uses to the device; the host does not wait."""
        used = self._used()
        self._device[used].copy_(self._host[used], non_blocking=True)

    def copy_out(self, count: int) -> torch.Tensor:
        """Copies the first ``count`` chosen tokens to ``results``, and returns that part."""
        part = self.results[:count]
        return part.copy_(self.chosen[:count], non_blocking=True)

    def view(self, name: str) -> torch.Tensor:
        """The device's tensor of the array called ``name``, in the size of the step."""
        return self._view(getattr(self.arrays, name))

    def _view(self, array: Array) -> torch.Tensor:
        start, dtype = self._offset(array), getattr(torch, str(array.dtype))
        return self._device[start : start + array.nbytes].view(dtype).view(array.shape)

    def batch(self) -> Batch:
        """The model's batch; its tokens are gathered on the device."""
        views: dict[str, Any] = {
            name: self.view(name) for name in ("positions", "kv_lens", "cu_q", "rows", "num_tokens")
        }
        return Batch(
            tokens=self._tokens.index_select(0, self.view("source_rows")),
            block_tables=tuple(map(self._view, self.arrays.block_tables)),
            max_q=self.arrays.size.max_q,
            **views,
        )


def allocate(
    manager: BlockManager, sizes: StepSizes, device: torch.device, count: int
) -> list[StepBuffers]:
    """``count`` buffers for steps of ``sizes`` on ``device``."""
    needed = array_bytes((sizes.largest.rows,), "int32")

    def measure(shape: tuple[int, ...], dtype: str) -> Array:
        nonlocal needed
        needed += array_bytes(shape, dtype)
        return np.empty(shape, dtype)

    StepArrays(manager, sizes, measure)
    host = torch.zeros(count, needed, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = torch.zeros_like(host, device=device)
    return [StepBuffers(index, manager, sizes, host, memory) for index in range(count)]
