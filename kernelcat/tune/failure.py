"""Makes a reply from an exception."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace

from kernelcat.errors import CompileError, MissingDependency, Unsupported
from kernelcat.tune.channel import ChildDied, ChildTimeout
from kernelcat.tune.messages import SKIPPED, Failed, Reply

MAX_TRIES = 4
"""How often a request is sent to a fresh process while other processes end these processes."""
PATIENCE = 2
"""Factor by which a request gets more time after its first failure: the machine may be busy."""


class Rejected(Exception):
    """A candidate failed: ``status`` of the row, and ``max_error`` where a result was compared."""

    def __init__(self, status: str, detail: str, max_error: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.max_error = status, max_error


def failure(error: Exception) -> Failed:
    """The reply for ``error``: the status of the row, and the text of the exception."""
    if isinstance(error, Rejected):
        return Failed(error.status, str(error), error.max_error)
    if isinstance(error, CompileError):
        return Failed("compile_error", str(error))
    if isinstance(error, (MissingDependency, Unsupported, MemoryError)):
        return Failed(SKIPPED, " ".join(str(error).split()))
    return Failed("launch_error", f"{type(error).__name__}: {error}")


def lost_child(error: ChildTimeout | ChildDied) -> Failed:
    """The reply in place of that of a process that hung or ended."""
    if isinstance(error, ChildTimeout):
        return Failed("timeout", str(error), fatal=True)
    if error.outside:
        return Failed(SKIPPED, f"the process was {error}", fatal=True, outside=True)
    return Failed("crashed", str(error), fatal=True)


def tried_again(
    ask: Callable[[int], Reply | Failed], culprit: Callable[[], Hashable] = lambda: None
) -> Reply | Failed:
    """The reply to ``ask``; a hang or a crash counts only if it occurs twice.

    ``ask(patience)`` sends the request, to a fresh process after a failure that is fatal, with
    ``patience`` times its time limit. ``culprit`` returns what the last failure is blamed on:
    another culprit is another failure. A process that was ended from outside proves nothing.
    """
    blamed: Counter[Hashable] = Counter()
    for number in range(MAX_TRIES):
        reply = ask(PATIENCE if number else 1)
        if not isinstance(reply, Failed) or not reply.fatal:
            return reply
        blamed[culprit()] += not reply.outside
        if blamed[culprit()] > 1:
            return replace(reply, detail=f"twice, in fresh processes: {reply.detail}; {_load()}")
    return reply


def _load() -> str:
    """How busy the machine is: a hint why a process did not answer in time."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
