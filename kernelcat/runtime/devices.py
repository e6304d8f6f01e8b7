"""GPUs of this machine that work side by side: their indices, and the SKU that they share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from kernelcat.errors import InvalidArgument
from kernelcat.runtime.gpu import Gpu

Devices = Sequence[int] | Literal["all"]
"""Indices of GPUs, as CUDA counts GPUs in this process; or all GPUs."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


def numbers(devices: Devices, count: int) -> tuple[int, ...]:
    """The indices of ``devices`` without repetition, in a machine with ``count`` GPUs.

    ``all`` in a machine without a GPU is GPU 0: opening it raises an error with the reason.

    Raises
    ------
    InvalidArgument
        ``devices`` is empty.
    """
    if devices == "all":
        return tuple(range(max(count, 1)))
    indices = tuple(dict.fromkeys(devices))
    if not indices:
        raise InvalidArgument("name at least one GPU, or all")
    return indices


def shared_sku(gpus: Mapping[int, Gpu]) -> Gpu:
    """The row of the first of ``gpus`` (index -> GPU), which must all be of one SKU.

    Raises
    ------
    InvalidArgument
        SKUs differ: results of one SKU do not hold for another.
    """
    first, *others = gpus
    for other in others:
        if gpus[other].sku != gpus[first].sku:
            raise InvalidArgument(
                f"GPU {first} is a {gpus[first].sku} and GPU {other} a {gpus[other].sku}: name "
                "GPUs of one kind with --device"
            )
    return gpus[first]


def visible(number: int) -> str:
    """``CUDA_VISIBLE_DEVICES`` for a child process that sees only this process's GPU ``number``."""
    value = os.environ.get(VISIBLE)
    return str(number) if value is None else value.split(",")[number].strip()
