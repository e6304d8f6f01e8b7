"""Which GPUs of this machine work side by side: their numbers, and the one SKU they share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

from kernelcat.errors import InvalidArgument
from kernelcat.runtime.gpu import Gpu

Devices = Sequence[int] | Literal["all"]
"""GPUs by the number CUDA gives them in this process."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


def numbers(devices: Devices, count: int) -> tuple[int, ...]:
    """The GPUs meant, each once, where ``count`` are here; ``all`` of none is the first.

    Raises
    ------
    InvalidArgument
        When that is none.
    """
    if devices == "all":
        return tuple(range(max(count, 1)))  # asking for a GPU that is not here tells why it is not
    found = tuple(dict.fromkeys(devices))
    if not found:
        raise InvalidArgument("name at least one GPU, or all")
    return found


def shared_sku(gpus: Mapping[int, Gpu]) -> Gpu:
    """What all of ``gpus`` (by number) are.

    Raises
    ------
    InvalidArgument
        When they differ: results of one cannot stand for the other.
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
    """``CUDA_VISIBLE_DEVICES`` of a process that sees GPU ``number`` of this one alone."""
    mine = os.environ.get(VISIBLE)
    return str(number) if mine is None else mine.split(",")[number].strip()
