"""Tensors between guard bands, in poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kernelcat import dtypes
from kernelcat.catalog.spec import Problem, Tensor

GUARD_BYTES = 4096
"""Bytes of the guard band before a tensor, and of the one after it."""
POISON = 0xFF
"""Every byte of poisoned memory, which is NaN in a float type."""
BANDS = (POISON, 0x7F)
"""The two patterns of guard bands: a kernel that writes one pattern out of bounds changes the
other. Each byte of 0x7F is NaN in float16 and float8, and 3.4e38 in bfloat16 and float32."""
PATTERNS = (0xFF, 0x7F, 0xFE, 0x7E, 0xFD, 0x7D, 0xFC, 0x7C)
"""Patterns of poison between timed blocks: NaN, infinity or more than 1e36 in 16 and 32 bits."""


@dataclass(frozen=True)
class Buffer:
    """A tensor between guard bands.

    Attributes
    ----------
    raw : guard band, tensor, guard band as bytes, shape (2 * GUARD_BYTES + size of the tensor)
    view : the array for kernels, with the tensor's shape, strides and storage dtype
    used : bytes of the tensor's elements, shape (*shape, itemsize); None without gaps
    """

    tensor: Tensor
    raw: Any
    view: Any
    used: Any

    @staticmethod
    def poisoned(
        tensor: Tensor, problem: Problem, xp: Any, empty: Callable[[int], Any] | None = None
    ) -> Buffer:
        """A buffer for ``tensor`` in which every byte is poison; ``xp`` is NumPy or CuPy.

        ``empty`` allocates so many bytes, by default those of ``xp``.
        """
        dtype = dtypes.STORAGE[tensor.dtype_of(problem)]
        size = np.dtype(dtype).itemsize
        span = tensor.span_of(problem) * size
        raw = (empty or partial(xp.empty, dtype="uint8"))(GUARD_BYTES + span + GUARD_BYTES)
        raw.fill(POISON)
        shape, strides = tensor.shape_of(problem), tensor.strides_of(problem)
        flat = raw[GUARD_BYTES : GUARD_BYTES + span].view(dtype)
        byte_strides = tuple(s * size for s in strides)
        view = xp.lib.stride_tricks.as_strided(flat, shape, byte_strides)
        return Buffer(tensor, raw, view, _used(raw, shape, byte_strides, size, xp))

    def refill(self, poison: int, values: Any = None) -> None:
        """Overwrite everything with the byte ``poison``, then the tensor with ``values``.

        ``values`` has the tensor's shape and storage dtype; None leaves the tensor poisoned.
        """
        words = wide(self.raw)
        words.fill(np.frombuffer(bytes([poison]) * words.dtype.itemsize, words.dtype)[0])
        if values is not None:
            self.view[...] = values

    def outside_intact(self, poison: int = POISON) -> bool:
        """Whether the guard bands and the gaps between strided rows still hold ``poison``."""
        outside = self.raw.size - self.view.size * self.view.dtype.itemsize
        if self.used is None:
            head, tail = self.raw[:GUARD_BYTES], self.raw[self.raw.size - GUARD_BYTES :]
            return bool((head == poison).all()) and bool((tail == poison).all())
        poisoned = int((self.raw == poison).sum()) - int((self.used == poison).sum())
        return poisoned == outside


def bits(array: Any) -> Any:
    """The bits of ``array`` as unsigned integers of its elements' size, in its shape."""
    return array.view(f"uint{8 * array.dtype.itemsize}")


def wide(array: Any) -> Any:
    """The bits of ``array`` as uint64 in one dimension, where its bytes lie together and fill them.

    For other arrays :func:`bits`. CuPy's kernels take a thread for an element, so eight bytes an
    element are fewer threads than one.
    """
    if array.flags.c_contiguous and array.nbytes % 8 == 0:
        return array.reshape(-1).view("uint64")
    return bits(array)


def _used(raw: Any, shape: Sequence[int], strides: Sequence[int], size: int, xp: Any) -> Any:
    """The bytes of the elements, shape (*shape, size), where gaps lie between them; else None.

    ``shape`` and ``strides`` (in bytes) are the tensor's, ``size`` is the bytes of an element.
    """
    packed = size * int(np.prod(shape))
    if raw.size == packed + 2 * GUARD_BYTES:
        return None
    body = raw[GUARD_BYTES : raw.size - GUARD_BYTES]
    return xp.lib.stride_tricks.as_strided(body, (*shape, size), (*strides, 1))
