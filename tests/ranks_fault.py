"""A rank of a group that computes `all_reduce` and may fail: ``RANK RANKS GPU SOCKET FAULT``.

The last rank has the fault. ``none``: there is none. ``dies``: the process ends before the launch.
``hangs``: it never launches. ``late``: it launches 2 s later. ``shape``: it loads another problem.
Prints the error in one line, or ``right`` or ``wrong``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kernelcat import catalog
from kernelcat.errors import RankFailed
from kernelcat.ranks import shares
from kernelcat.ranks.group import Group
from kernelcat.runtime.device import CudaDevice


def main() -> None:
    rank, ranks, gpu = map(int, sys.argv[1:4])
    fault = sys.argv[5] if rank == ranks - 1 else "none"
    entry = catalog.entry("all_reduce")
    problem = entry.problem(
        tokens=2 if fault == "shape" else 1, hidden=2880, ranks=ranks, dtype="bfloat16"
    )
    implementation = catalog.implementation("all_reduce", "cuda", "ll")
    try:
        group = Group(rank, ranks, Path(sys.argv[4]), CudaDevice(gpu))
        config = implementation.default(problem, group.gpu)
        bind = group.load(implementation, problem, config)
        prepared = shares.prepare(entry, problem, group, rank, seed=0)
        group.synchronize()
        if fault == "dies":
            os._exit(7)
        if fault == "hangs":
            time.sleep(60)
        if fault == "late":
            time.sleep(2)
        bind(prepared.arrays)()
        group.synchronize()
        print("right" if prepared.judge().passed else "wrong", flush=True)
    except RankFailed as error:
        print(error, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
