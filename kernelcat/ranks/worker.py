"""The process of one rank: ``python -m kernelcat.ranks.worker RANK RANKS GPU SOCKET JOB``.

JOB is an object in JSON whose ``verb`` names a function of this package. The last line of standard
output is an object with the job's ``value``, or the reason why it ``failed``.
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
from kernelcat.runtime.device import CudaDevice


def verbs() -> dict[str, Callable[[Group, Mapping[str, Any]], Any]]:
    """Name of a job -> what a rank does for it."""
    from kernelcat.ranks import check, race

    return {"check": check.on_rank, "race": race.on_rank}


def main() -> None:
    """Do the job that the arguments describe."""
    rank, ranks, gpu = map(int, sys.argv[1:4])
    path, job = Path(sys.argv[4]), json.loads(sys.argv[5])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result
    try:
        group = Group(rank, ranks, path, CudaDevice(gpu))
        result = {"value": verbs()[job["verb"]](group, job)}
        group.close()
    except KernelcatError as error:
        result = {"failed": str(error)}
    print(json.dumps(result), file=out, flush=True)
    os._exit(0)  # what libraries do at exit may wait for ranks that have ended


if __name__ == "__main__":
    main()
