"""A cache in one piece of memory that another process maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from kernelcat.moe.cache import CacheLayer, KvCache, windows

ALIGNMENT = 256
"""Bytes that each tensor begins at a multiple of."""


def cache_bytes(
    layers: Sequence[CacheLayer], pages: Sequence[int], page_size: int, dtype: torch.dtype
) -> int:
    """Bytes of a cache; arguments as in `KvCache.allocate`."""
    return sum(_padded(shape, dtype) for shape in _shapes(layers, pages, page_size, dtype))


def cache_in(
    memory: torch.Tensor,
    layers: Sequence[CacheLayer],
    pages: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
) -> KvCache:
    """A cache in ``memory``, uint8 (bytes,); other arguments as in `KvCache.allocate`."""
    tensors, start = [], 0
    for shape in _shapes(layers, pages, page_size, dtype):
        part = memory[start : start + prod(shape) * dtype.itemsize]
        tensors.append(part.view(dtype).view(shape))
        start += _padded(shape, dtype)
    parts, groups = iter(tensors), windows(layers)
    return KvCache(
        tuple(tuple(next(parts) for _ in layer.rows) for layer in layers),
        tuple(groups.index(layer.window) for layer in layers),
    )


def _shapes(
    layers: Sequence[CacheLayer], pages: Sequence[int], page_size: int, dtype: torch.dtype
) -> Iterator[tuple[int, ...]]:
    """The shapes of all tensors, layer by layer."""
    groups = windows(layers)
    for layer in layers:
        for row in layer.shapes(dtype):
            yield (pages[groups.index(layer.window)], page_size, *row)


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
