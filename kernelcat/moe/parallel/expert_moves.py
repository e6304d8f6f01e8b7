"""Experts that change places: their weights go from rank to rank by way of the hosts.

A rank writes the weights that leave it to a file in memory, which all ranks map (`memfd_create`).
Both kinds of ranks, with and without a GPU, move weights so. No step is in flight meanwhile; graphs
stay valid, because places keep their memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from kernelcat.moe.parallel.exchange import ANSWER_S, Exchange
from kernelcat.moe.parallel.expert_layer import ARRIVED, NUM_SERVED, PLACES
from kernelcat.moe.parallel.expert_placement import Counts

NOT_MOVED = (ARRIVED, NUM_SERVED, PLACES, "correction")
"""What a layer's experts have of all ranks' experts together."""


def move(exchange: Exchange, experts: Mapping[str, torch.Tensor], sources: Counts) -> None:
    """Gives each place p of a layer the weights in place ``sources[p]``, on all ranks together.

    Raises ``RankFailed`` where a rank does not answer.
    """
    tensors = [experts[name] for name in sorted(experts) if name not in NOT_MOVED]
    local = len(tensors[0])
    moved = np.flatnonzero(sources != np.arange(len(sources)))
    leaving = [[int(p) for p in moved if p // local == rank] for rank in range(exchange.ranks)]
    file = os.memfd_create("experts")
    for place in leaving[exchange.rank]:
        for row in _rows(tensors, place % local):
            _write(file, row)
    _, files = exchange.rendezvous.gather(None, file, limit_s=ANSWER_S)
    size = sum(row.numel() for row in _rows(tensors, 0))
    for place in leaving[exchange.rank]:
        source = int(sources[place])
        holder = source // local
        offset = size * leaving[holder].index(source)
        for row in _rows(tensors, place % local):
            row.copy_(_read(files[holder], offset, row.numel()))
            offset += row.numel()
    for each in files:
        os.close(each)


def _rows(tensors: Sequence[torch.Tensor], index: int) -> Iterator[torch.Tensor]:
    """The bytes of expert ``index`` of each tensor (local, ...), uint8 (bytes,), to be written."""
    for tensor in tensors:
        yield tensor.view(torch.uint8)[index].view(-1)


def _write(file: int, row: torch.Tensor) -> None:
    left = memoryview(row.cpu().numpy().data)
    while left:
        left = left[os.write(file, left) :]


def _read(file: int, offset: int, count: int) -> torch.Tensor:
    buffer = torch.empty(count, dtype=torch.uint8)
    left = memoryview(buffer.numpy().data)
    while left:
        read = os.preadv(file, [left], offset)
        left, offset = left[read:], offset + read
    return buffer
