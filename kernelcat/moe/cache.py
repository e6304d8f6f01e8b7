"""The paged cache of a model: what each layer keeps of every token.

A page holds ``page_size`` tokens of one layer group. Layers with the same attention window are a
*group*: they share one block table, because they need the same tokens. So gpt-oss has two groups,
one of which can free the pages that lie before its window, and other models have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from kernelcat.errors import InvalidArgument
from kernelcat.reference._mla_row import PACKED, ROW


@dataclass(frozen=True)
class CacheLayer:
    """What a layer caches of one token.

    Attributes
    ----------
    rows : shapes of its arrays: keys and values, ``((kv_heads, head_dim),) * 2``, or one latent
        row, ``((576,),)``
    window : tokens that a query attends to, its own included; 0: all
    """

    rows: tuple[tuple[int, ...], ...]
    window: int = 0

    def shapes(self, dtype: torch.dtype) -> list[tuple[int, ...]]:
        """``rows`` in a cache of ``dtype``: latent rows in float8 are 656 bytes (uint8)."""
        is_packed = dtype == torch.uint8
        return [(PACKED,) if is_packed and row == (ROW,) else row for row in self.rows]


def windows(layers: Sequence[CacheLayer]) -> tuple[int, ...]:
    """The window of each group, in the order of the groups' first layers."""
    return tuple(dict.fromkeys(layer.window for layer in layers))


def page_bytes(layers: Sequence[CacheLayer], page_size: int, dtype: torch.dtype) -> list[int]:
    """Bytes that a page of each group takes, in all layers of the group together."""
    elements = dict.fromkeys(windows(layers), 0)
    for layer in layers:
        elements[layer.window] += sum(map(prod, layer.shapes(dtype)))
    return [count * page_size * dtype.itemsize for count in elements.values()]


@dataclass(frozen=True)
class KvCache:
    """The tensors of all layers.

    Attributes
    ----------
    layers : for each layer its tensors, (pages, page_size, \\*row), in the order of
        `CacheLayer.rows`
    groups : for each layer the index of its group, which is the index of its block table
    """

    layers: tuple[tuple[torch.Tensor, ...], ...]
    groups: tuple[int, ...]

    @staticmethod
    def allocate(
        layers: Sequence[CacheLayer],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> KvCache:
        """A cache of zeros with ``pages[g]`` pages for the layers of group g.

        Parameters
        ----------
        layers : `Decoder.cache_layers` of the model
        page_size : tokens of a page: 16, 32, 64 or 128; 1, 16, 64 or 128 for latent rows
        dtype : the model's type, or float8_e4m3fn; for latent rows the model's type, or uint8

        Raises
        ------
        InvalidArgument
            ``pages`` has another length than the model has groups.
        """
        group_windows = windows(layers)
        if len(pages) != len(group_windows):
            raise InvalidArgument(
                f"the model has {len(group_windows)} groups of layers, not {len(pages)}"
            )
        groups = tuple(group_windows.index(layer.window) for layer in layers)
        tensors = (
            tuple(
                torch.zeros(pages[group], page_size, *shape, dtype=dtype, device=device)
                for shape in layer.shapes(dtype)
            )
            for layer, group in zip(layers, groups, strict=True)
        )
        return KvCache(tuple(tensors), groups)
