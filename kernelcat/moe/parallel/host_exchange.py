"""The exchange of processes without GPUs: every rank gathers all parts and calls the oracle."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kernelcat
from kernelcat.moe.parallel.exchange import ANSWER_S, START_S, Exchange, Tensors
from kernelcat.ranks.rendezvous import JOIN_S, Rendezvous, Watch, require_equal


class HostExchange(Exchange):
    """Rank ``rank`` of ``ranks`` processes that meet at the socket ``path``; tensors are on a CPU.

    Each rank computes the entry's oracle on the parts of all ranks, so results have the same bits
    on all. Float32 tensors stand for those of 16 bits, as in ``kernelcat.reference``.

    Raises
    ------
    RankFailed
        A rank did not come within ``join_s`` seconds, or what ``watch`` raises meanwhile.
    """

    def __init__(
        self, rank: int, ranks: int, path: Path, join_s: float = JOIN_S, watch: Watch | None = None
    ) -> None:
        super().__init__(Rendezvous(rank, ranks, path, join_s, watch))

    def _run(self, name: str, inputs: Tensors, out: Tensors, axes: Mapping[str, Any]) -> None:
        what = f"{name} {[_described(tensor) for tensor in inputs]} {dict(axes)}"
        data = [None if tensor is None else _encoded(tensor) for tensor in inputs]
        parts = self.gather({"runs": what, "data": data}, ANSWER_S)
        require_equal([part["runs"] for part in parts], "runs")
        columns = zip(inputs, zip(*(part["data"] for part in parts), strict=True), strict=True)
        whole = [
            None if own is None else torch.stack([_decoded(text, own) for text in texts])
            for own, texts in columns
        ]
        outs = [None if own is None else torch.stack([own] * self.ranks) for own in out]
        kernelcat.reference(name)(*whole, out=outs[0] if len(outs) == 1 else outs, **axes)
        for own, result in zip(out, outs, strict=True):
            if own is not None and result is not None:
                own.copy_(result[self.rank])

    def _shared_bytes(self, size: int) -> list[torch.Tensor]:
        return shared_memory(self.rendezvous, size, START_S)


def shared_memory(meeting: Rendezvous, size: int, limit_s: float) -> list[torch.Tensor]:
    """Host memory of each rank, uint8 (size,), which all ranks of a meeting map.

    Raises ``RankFailed`` where a rank has not called this within ``limit_s`` seconds.
    """
    file = os.memfd_create("kernelcat-shared")
    os.truncate(file, size)
    _, files = meeting.gather(None, file, limit_s=limit_s)
    parts = [torch.frombuffer(mmap(each, size), dtype=torch.uint8) for each in files]
    for each in files:
        os.close(each)
    return parts


def _described(tensor: torch.Tensor | None) -> str:
    """Type and shape: ``float32 (4, 64)``."""
    if tensor is None:
        return "nothing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _encoded(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return b64encode(data).decode()


def _decoded(text: str, like: torch.Tensor) -> torch.Tensor:
    """The tensor whose bytes are ``text``, of the type and shape of ``like``."""
    data = torch.from_numpy(np.frombuffer(b64decode(text), "uint8").copy())
    return data.view(like.dtype).view(like.shape)
