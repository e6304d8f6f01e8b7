"""Every error kernelcat raises on purpose: one clear line that says what to do."""

from __future__ import annotations


class KernelcatError(Exception):
    """Base class. The message is one line; the command line prints it without a traceback."""


class UnknownName(KernelcatError, LookupError):
    """An entry, problem, GPU, language or variant that does not exist; names the nearest ones."""


class InvalidArgument(KernelcatError, ValueError):
    """An argument with the wrong rank, shape, dtype, device, strides or value."""


class Unsupported(KernelcatError):
    """No implementation serves this problem on this GPU; says what would work."""


class MissingDependency(KernelcatError, ImportError):
    """A compiler, library or driver is not there; names the line that installs it."""


class CompileError(KernelcatError):
    """A kernel did not compile. ``log`` holds the compiler's full output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class LaunchError(KernelcatError):
    """The driver refused a launch, or a kernel failed while it ran."""


class StoreError(KernelcatError):
    """The tuning database cannot be read or written."""


def nearest(name: str, known: list[str]) -> str:
    """``; did you mean A or B?`` for a misspelt name, or the list of names when none is close."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
