"""The processes of ranks that divide the experts of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kernelcat.errors import InvalidArgument
from kernelcat.moe.parallel.expert_member import ExpertMember
from kernelcat.moe.source import ModelSource

Process = TypeVar("Process")


def start(
    source: ModelSource,
    ranks: int,
    rebalance_every: int,
    started: Callable[[ExpertMember], Process],
) -> tuple[tempfile.TemporaryDirectory[str], list[Process]]:
    """What ``started`` makes for each rank, and the folder in which the ranks meet.

    Raises ``InvalidArgument`` for fewer than two ranks, more ranks than GPUs, a negative number of
    steps, or a model whose layers are divided too.
    """
    if source.tp > 1 or source.upcycle:
        raise InvalidArgument("experts of an upcycled model, or with tp, cannot be divided")
    source.check_gpus(ranks)
    if ranks < 2 or rebalance_every < 0:
        raise InvalidArgument(
            f"{ranks} ranks and {rebalance_every} steps: experts are divided among two ranks or "
            "more, and steps are not negative"
        )
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "ranks"
    members = (ExpertMember(rank, ranks, path, rebalance_every) for rank in range(ranks))
    return folder, [started(member) for member in members]
