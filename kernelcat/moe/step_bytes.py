"""The fewest bytes that one decode step must read, and the time that a copy of them takes.

On several ranks these are the bytes of one. Where ranks divide the experts, those of one rank serve
the tokens of all.

Each weight is read once, of experts only those that serve a token: with equal chances top_k of E
experts for each of B tokens leave E (1 - (1 - top_k / E)^B) that do. Keys and values, or latent
rows, are read up to each sequence's last token, or as far as a window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kernelcat.moe.cache import page_bytes, windows
from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel.expert_layer import ARRIVED
from kernelcat.runtime.gpu import Gpu

COPY_BANDWIDTH = {"h200": 4.28e12}
"""Bytes a second, read and written, that the best copy reaches (docs/measured.md), by SKU."""


def bandwidth_of(gpu: Gpu) -> float:
    """Bytes a second to hope for: a copy's where one was measured, else the datasheet's."""
    return COPY_BANDWIDTH.get(gpu.sku, gpu.bandwidth)


def step_bytes(
    model: Decoder, batch: int, context: int, cache_dtype: torch.dtype, num_others: int = 0
) -> int:
    """Bytes that a decode step of ``batch`` sequences with ``context`` tokens each must read.

    ``num_others`` counts the sequences of other ranks, whose tokens experts of this one may serve.
    """
    top_k = getattr(model.config, "num_experts_per_tok", 0)
    ranks = model.divided.exchange.ranks if model.divided else 1
    weights = sum(_weight_bytes(layer, top_k, batch + num_others, ranks) for layer in model.layers)
    weights += _size(model.head_part) + _size(model.norm) + batch * _size(model.embed[0])
    token_bytes = page_bytes(model.cache_layers, 1, cache_dtype)
    cached = sum(
        each * min(window or context, context)
        for each, window in zip(token_bytes, windows(model.cache_layers), strict=True)
    )
    return int(weights + batch * cached)


def _weight_bytes(layer: Any, top_k: int, batch: int, ranks: int) -> float:
    """Bytes of a layer's weights that serve ``batch`` tokens; ``experts`` are read in part.

    One in ``ranks`` of the experts is here. What is not a row of each of these is read whole: the
    counts, places and corrections of the experts of all ranks. What has arrived is the step's own.
    """
    total = 0.0
    for one in fields(layer):
        value = getattr(layer, one.name)
        if one.name != "experts":
            total += sum(map(_size, _tensors(value)))
            continue
        for name, tensor in value.items():
            if name == ARRIVED:
                continue
            is_whole = len(tensor) != len(value["w1"])
            part = 1 if is_whole else 1 - (1 - top_k / (ranks * len(tensor))) ** batch
            total += _size(tensor) * part
    return total


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested data classes, dictionaries and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
