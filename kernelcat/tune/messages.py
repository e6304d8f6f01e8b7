"""Messages between the processes of a tune.

A request of type ``Request[Reply]`` is answered by a ``Reply`` or by :class:`Failed`.
Messages travel as pickles (``kernelcat.tune.channel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.runtime.telemetry import Reading
from kernelcat.tune.candidate import Candidate

Reply = TypeVar("Reply")

SKIPPED = "skipped"
"""Status of a failure that the candidate did not cause: something is not installed, or the device's
memory is full. Nothing is recorded, and the candidate is tried again in the next tune."""


class Request(Generic[Reply]):
    """A request from the parent to a child, which answers with a ``Reply``."""


@dataclass(frozen=True)
class Failed:
    """The request could not be done.

    Attributes
    ----------
    status : a ``Status`` of ``kernelcat.store.measurement``, or :data:`SKIPPED`
    detail : why, for the user
    max_error : largest error against the oracle, where ``status`` is ``wrong``
    fatal : whether the child ends after this reply
    outside : whether another process ended the child; ``status`` is then :data:`SKIPPED`
    """

    status: str
    detail: str
    max_error: float | None = None
    fatal: bool = False
    outside: bool = False


@dataclass(frozen=True)
class Greeting:
    """The measuring process has started: SKU of its GPU, environment, and regimes of its timer."""

    gpu: str
    environment: Mapping[str, Any]
    regimes: tuple[str, ...]


@dataclass(frozen=True)
class Hello(Request[Greeting]):
    """Asks a measuring process for its :class:`Greeting`."""


@dataclass(frozen=True)
class Placed:
    """The arrays of the problem are on the device.

    Attributes
    ----------
    copies : number of copies of the arrays, used in turn
    bytes : size of one copy
    l2 : ``cold`` if the copies together are too large to stay in the L2 cache, else ``warm``
    """

    copies: int
    bytes: int
    l2: str


@dataclass(frozen=True)
class Place(Request[Placed]):
    """Asks to draw inputs with ``seed``, to compute the oracle, and to put the copies on the
    device."""

    problem: Problem
    seed: int


@dataclass(frozen=True)
class Cleared:
    """The device has nothing of a problem any more."""


@dataclass(frozen=True)
class Clear(Request[Cleared]):
    """Asks to free the arrays and the loaded kernels of the problem, if there is one."""


@dataclass(frozen=True)
class Passed:
    """The gate accepted the result: error and signal to noise, None where they are not defined.

    ``sqnr_db`` is None where no input is quantized.
    """

    max_error: float | None
    sqnr_db: float | None


@dataclass(frozen=True)
class Verify(Request[Passed]):
    """Asks to check the result of the candidate for the inputs of ``seed``."""

    candidate: Candidate
    seed: int


@dataclass(frozen=True)
class Timing:
    """Times of a candidate whose result is right.

    ``samples`` are microseconds of one run, one sample for each block; ``readings`` are clock,
    power and temperature of the chip during the blocks.
    """

    samples: tuple[float, ...]
    readings: tuple[Reading, ...] = ()
    max_error: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class Screen(Request[Timing]):
    """Asks to check the candidate on the inputs of :class:`Place`, and to time the candidate for
    ``budget_us``.

    ``best_us`` is the time of the fastest candidate so far; a much slower candidate is timed only
    once. Both are microseconds.
    """

    candidate: Candidate
    budget_us: float
    best_us: float | None


@dataclass(frozen=True)
class Raced:
    """The times, or the failure, of every contestant of a race."""

    outcomes: Mapping[Candidate, Timing | Failed]


@dataclass(frozen=True)
class Race(Request[Raced]):
    """Asks to race the candidates in interleaved blocks, and to judge the memory in between.

    ``seed`` is for the order of the contestants, ``other_seed`` for the inputs that take turns with
    those of :class:`Place`, ``new_seeds`` for the inputs of the passes after the race.
    """

    candidates: tuple[Candidate, ...]
    regime: str
    state: str
    seed: int
    other_seed: int
    new_seeds: tuple[int, ...]


@dataclass(frozen=True)
class Built:
    """The candidate compiles.

    Attributes
    ----------
    steps : for each launch the numbers of the artifact's metadata
    cpu_s : seconds of a CPU core that the compilers took
    """

    steps: tuple[Mapping[str, Any], ...] = ()
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Build(Request[Built]):
    """Asks a compiling process to build the candidate for ``gpu`` into the disk cache."""

    problem: Problem
    candidate: Candidate
    gpu: Gpu
