"""Engines on several ranks: their limits, and the processes of the ranks that follow."""

from __future__ import annotations

from pathlib import Path

from processes import children

from kernelcat.moe.engine.limits import Limits

LIMITS = Limits(step_tokens=48, max_running=4, max_waiting=16, context=256)
ANSWER_S = 10.0
"""Seconds in which everybody has an answer after a rank has failed."""


def command_of(guard: int) -> int:
    """The process that a guard runs."""
    [command] = children(guard)
    return command


def followers_below(pid: int) -> list[int]:
    """The ranks that follow among the processes that process ``pid``, or one of these, started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has just ended
            continue
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])

    def is_below(each: int) -> bool:
        return each == pid or (each in parents and is_below(parents[each]))

    def is_follower(each: int) -> bool:
        command = (Path("/proc") / str(each) / "cmdline").read_bytes()
        return b"parallel.follower" in command and b"guard.py" not in command

    return [each for each in parents if is_below(each) and is_follower(each)]
