"""`kernelcat.ranks.worker` without a GPU: ``RANK RANKS GPU SOCKET JOB``, on `ranks_machine`.

A job's ``fault`` is that of the last rank. ``dies``: the process ends before its first launch.
``breaks``: its results are wrong. ``misses``: it launches nothing. ``lingers``: it gives a reason
and does not end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ranks_machine

from kernelcat.errors import RankFailed
from kernelcat.ranks import group, worker


def fails(*_: object) -> None:
    raise RankFailed("no memory is left")


def main() -> None:
    rank, ranks = map(int, sys.argv[1:3])
    fault = json.loads(sys.argv[5]).get("fault") if rank == ranks - 1 else None
    ranks_machine.stand_in()
    module: Any = worker
    module.CudaDevice = lambda gpu: ranks_machine.Device()
    module.MirroredDevice = lambda gpu: ranks_machine.Mirrored()
    ranks_machine.Device.is_broken = fault == "breaks"
    if fault == "dies":
        group.Group.meet = lambda _: os._exit(7)  # type: ignore[method-assign]
    if fault == "misses":
        group.Group.missing = lambda _: 0  # type: ignore[method-assign]
    if fault == "lingers":
        group.Group.load = fails  # type: ignore[method-assign, assignment]
    worker.main()
    if fault == "lingers":
        time.sleep(60)


if __name__ == "__main__":
    main()
