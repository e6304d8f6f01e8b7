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
    """A job of several ranks failed; ``lines`` are what rank 0 wrote before."""

    def __init__(self, reason: str, lines: Sequence[str]) -> None:
        super().__init__(reason)
        self.lines = lines


class RanksSilent(JobFailed):
    """Rank 0 wrote nothing for too long."""

    def __init__(self, seconds: float, lines: Sequence[str]) -> None:
        after = lines[-1] if lines else "its start"
        super().__init__(f"rank 0 gave no sign for {seconds:g} s after {after}", lines)


@dataclass(frozen=True)
class Ended:
    """How the process of a rank ended.

    Attributes
    ----------
    result : the job's ``value``, the reason why it ``failed``, or how the process ``died``
    text : what the process and the libraries in it printed
    code : the exit status
    """

    result: dict[str, Any]
    text: str
    code: int


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    answer: Path


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
        Rank 0 wrote nothing for ``silence_s`` seconds. No process is left.
    """
    ended = run_under((), job, gpus, limit_s, silence_s)
    if reason := failure(ended):
        raise JobFailed(reason, ended[0].text.splitlines())
    return [each.result["value"] for each in ended]


def run_under(
    tool: Sequence[str],
    job: Mapping[str, Any],
    gpus: Sequence[int],
    limit_s: float,
    silence_s: float = inf,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """How a job ended on each rank; each process is started by the words ``tool`` and its command.

    ``env`` is the environment of the processes, by default that of this one.

    Raises
    ------
    RankFailed
        The job took more than ``limit_s`` seconds; the message has the reason if a rank gave one.
    RanksSilent
        As :func:`run`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks"
        started = [_start(tool, job, rank, gpus, path, env) for rank in range(len(gpus))]
        try:
            _wait(started, limit_s, silence_s)
        finally:
            for each in started:
                children.stop(each.process)
        return [_ended(each) for each in started]


def failure(ended: Sequence[Ended]) -> str:
    """Why a job gave no value on some rank, in one line; empty where it gave one on all."""
    results = [each.result for each in ended]
    reasons = [result["failed"] for result in results if "failed" in result]
    dead = [f"rank {rank}: {result['died']}" for rank, result in enumerate(results)
            if "died" in result]  # fmt: skip
    return "; ".join(dead or dict.fromkeys(reasons))


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
            reasons = [answer["failed"] for answer in map(_answer, started) if "failed" in answer]
            late = f"the ranks did not end within {limit_s:g} s"
            raise RankFailed("; ".join(dict.fromkeys([late, *reasons])))
        time.sleep(_POLL_S)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def _start(
    tool: Sequence[str],
    job: Mapping[str, Any],
    rank: int,
    gpus: Sequence[int],
    path: Path,
    env: Mapping[str, str] | None,
) -> _Process:
    log = tempfile.TemporaryFile()  # noqa: SIM115
    arguments = [*map(str, (rank, len(gpus), gpus[rank], path)), json.dumps(job)]
    process = children.start(
        [*tool, *children.python(WORKER, *arguments)],
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
    )  # fmt: skip
    return _Process(process, log, answer_path(path, rank))


def answer_path(path: Path, rank: int) -> Path:
    """The file in which ``rank`` leaves its result, where ``path`` is the group's socket."""
    return path.with_name(f"{path.name}.{rank}")


def _answer(each: _Process) -> dict[str, Any]:
    """What the rank left as its result; empty where it left none."""
    try:
        answer: dict[str, Any] = json.loads(each.answer.read_text())
        return answer
    except (OSError, ValueError):
        return {}


def _ended(each: _Process) -> Ended:
    text, code = "\n".join(_lines(each.log)), each.process.returncode
    how, tail = children.ending(code), " ".join(text[-TAIL_BYTES:].split())
    died = {"died": f"{how}: {tail}" if tail else how}
    return Ended(_answer(each) or died, text, code)
