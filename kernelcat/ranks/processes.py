"""One process for each rank: start them, wait for all, and say what went wrong first."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any

from kernelcat.errors import RankFailed
from kernelcat.runtime import children

WORKER = "kernelcat.ranks.worker"
TAIL_BYTES = 600
"""Bytes at the end of a dead rank's standard error that become part of the error message."""

MOURNING_S = 10.0
"""Seconds that other ranks have after one has died."""
_POLL_S = 0.02


class JobFailed(RankFailed):
    """A job of several ranks failed; ``lines`` are what rank 0 wrote to standard error before."""

    def __init__(self, reason: str, lines: Sequence[str]) -> None:
        super().__init__(reason)
        self.lines = lines


class RanksSilent(JobFailed):
    """Rank 0 wrote nothing to standard error for too long."""

    def __init__(self, seconds: float, lines: Sequence[str]) -> None:
        after = lines[-1] if lines else "its start"
        super().__init__(f"rank 0 gave no sign for {seconds:g} s after {after}", lines)


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    log: IO[bytes]


def run(
    job: Mapping[str, Any], gpus: Sequence[int], limit_s: float, silence_s: float = inf
) -> list[Any]:
    """The results of a job of :mod:`~kernelcat.ranks.worker` on each rank.

    ``gpus`` are the numbers of the ranks' GPUs, which may be equal.

    Raises
    ------
    RankFailed
        The job took more than ``limit_s`` seconds. No process is left.
    JobFailed
        A rank failed or ended. No process is left.
    RanksSilent
        Rank 0 wrote nothing to standard error for ``silence_s`` seconds. No process is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "ranks")
        started = [_start(job, rank, gpus, path) for rank in range(len(gpus))]
        try:
            _wait(started, limit_s, silence_s)
        finally:
            for each in started:
                children.stop(each.process)
    results = [_result(each) for each in started]
    reasons = [result["failed"] for result in results if "failed" in result]
    dead = [f"rank {rank}: {result['died']}" for rank, result in enumerate(results)
            if "died" in result]  # fmt: skip
    if dead or reasons:
        raise JobFailed("; ".join(dead or dict.fromkeys(reasons)), _lines(started[0].log))
    return [result["value"] for result in results]


def _wait(started: Sequence[_Process], limit_s: float, silence_s: float) -> None:
    """Wait for all processes; once one has died the others get a while to notice."""
    waiting, log = [each.process for each in started], started[0].log
    deadline, size, sign = time.monotonic() + limit_s, 0, time.monotonic()
    while any(process.poll() is None for process in waiting):
        now = time.monotonic()
        if size != (size := os.fstat(log.fileno()).st_size):
            sign = now
        if now > sign + silence_s:
            raise RanksSilent(silence_s, _lines(log))
        if any(process.returncode for process in waiting):
            deadline = min(deadline, now + MOURNING_S)
        if now > deadline:
            if any(process.returncode for process in waiting):
                return
            raise RankFailed(f"the ranks did not end within {limit_s:g} s")
        time.sleep(_POLL_S)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def _start(job: Mapping[str, Any], rank: int, gpus: Sequence[int], path: str) -> _Process:
    out, log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    arguments = [*map(str, (rank, len(gpus), gpus[rank])), path, json.dumps(job)]
    command = children.python(WORKER, *arguments)
    return _Process(
        children.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log), out, log
    )


def _result(each: _Process) -> dict[str, Any]:
    """What the rank printed last, or how it died."""
    try:
        result: dict[str, Any] = json.loads(_lines(each.out)[-1])
        return result
    except (IndexError, ValueError):
        each.log.seek(0)
        tail = " ".join(each.log.read()[-TAIL_BYTES:].decode(errors="replace").split())
        how = children.ending(each.process.returncode)
        return {"died": f"{how}: {tail}" if tail else how}
