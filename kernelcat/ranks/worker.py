"""The process of one rank: ``python -m kernelcat.ranks.worker RANK RANKS GPU SOCKET JOB``.

JOB is an object in JSON whose ``verb`` names a function of this package. The file SOCKET.RANK then
has an object with the job's ``value``, or the reason why it ``failed``; what libraries and tools
print is no result. With ``mirrored`` arrays are on the host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernelcat.errors import KernelcatError
from kernelcat.ranks.group import Group
from kernelcat.ranks.mirrored import MirroredGroup
from kernelcat.ranks.processes import answer_path
from kernelcat.runtime.device import CudaDevice, MirroredDevice


def verbs() -> dict[str, Callable[[Group, Mapping[str, Any]], Any]]:
    """Name of a job -> what a rank does for it."""
    from kernelcat.ranks import check, race

    return {"check": check.on_rank, "race": race.on_rank}


def main() -> None:
    """Do the job that the arguments describe."""
    rank, ranks, gpu = map(int, sys.argv[1:4])
    path, job = Path(sys.argv[4]), json.loads(sys.argv[5])
    mirrored = job.get("mirrored", False)
    try:
        group = (
            MirroredGroup(rank, ranks, path, MirroredDevice(gpu), job["slowness"]) if mirrored
            else Group(rank, ranks, path, CudaDevice(gpu))
        )  # fmt: skip
        result = {"value": verbs()[job["verb"]](group, job)}
        group.close()
    except KernelcatError as error:
        result = {"failed": str(error)}
    answer_path(path, rank).write_text(json.dumps(result))
    if not mirrored:  # else a tool may look at the process's own end
        os._exit(0)  # what libraries do at exit may wait for ranks that have ended


if __name__ == "__main__":
    main()
