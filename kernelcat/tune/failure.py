"""What went wrong with a candidate, as a status and a line of text."""

from __future__ import annotations

from kernelcat.errors import CompileError, MissingDependency, Unsupported
from kernelcat.tune.channel import Message

SKIPPED = "skipped"
"""Not the candidate's fault (something is not installed, memory is full): not held against it."""


class Rejected(Exception):
    """A candidate failed with ``status``."""

    def __init__(self, status: str, detail: str, max_error: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.max_error = status, max_error


def failure(error: Exception) -> Message:
    """The status an exception amounts to, and its text."""
    if isinstance(error, Rejected):
        return {"status": error.status, "detail": str(error), "max_error": error.max_error}
    if isinstance(error, CompileError):
        return {"status": "compile_error", "detail": str(error)}
    if isinstance(error, (MissingDependency, Unsupported, MemoryError)):
        return {"status": SKIPPED, "detail": " ".join(str(error).split())}
    return {"status": "launch_error", "detail": f"{type(error).__name__}: {error}"}
