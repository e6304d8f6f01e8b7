"""Exceptions that kernelcat raises; each message is one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KernelcatError(Exception):
    """Base class. The message is one line; the command line prints it without a traceback."""


class UnknownName(KernelcatError, LookupError):
    """There is no entry, problem, GPU, language or variant of that name.

    The message lists the nearest names.
    """


class InvalidArgument(KernelcatError, ValueError):
    """An argument has a wrong rank, shape, element type, device, stride or value."""


class Unsupported(KernelcatError):
    """No implementation serves this problem on this GPU; the message has the reasons."""


class MissingDependency(KernelcatError, ImportError):
    """A compiler, library or driver is missing; the message has the command that installs it."""


class CompileError(KernelcatError):
    """A kernel does not compile. ``log`` holds the compiler's full output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class LaunchError(KernelcatError):
    """The driver refused a launch, or a kernel failed while running."""


class RankFailed(KernelcatError):
    """A rank ended, hangs, came late or failed, or the ranks do not agree on what they compute."""


class LockError(KernelcatError):
    """What would run differs from the lock that :func:`kernelcat.use_lock` turned on."""


class StoreError(KernelcatError):
    """The tuning database cannot be read or written."""


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Raises ``MissingDependency`` if an import in the context finds no package of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependency(f"{error}: pip install 'kernelcat[{name}]'") from error


def short(value: object) -> str:
    """``repr(value)``, of which only the first 40 characters are shown.

    A number with thousands of digits has no ``repr`` in Python.
    """
    if isinstance(value, int) and abs(value) > 1 << 128:
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def nearest(name: object, names: list[str]) -> str:
    """The end of a message about an unknown ``name``: ``; did you mean A or B?``.

    Where no known name is close the text lists all of them; it is empty where there are none.
    """
    import difflib

    is_text = isinstance(name, str)
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5) if is_text else []
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(sorted(names))}" if names else ""
