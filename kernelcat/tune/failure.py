"""Makes a reply from an exception."""

from __future__ import annotations

from kernelcat.errors import CompileError, MissingDependency, Unsupported
from kernelcat.tune.messages import SKIPPED, Failed


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
