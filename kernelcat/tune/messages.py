"""What the tuner's processes say to each other.

Every request names the type of its reply. Any request may be answered by :class:`Failed` instead.
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
"""Status of a failure that is not held against the candidate: something is not installed, or the
device's memory is full."""


class Request(Generic[Reply]):
    """What the parent asks of a child that answers with a ``Reply``."""


@dataclass(frozen=True)
class Failed:
    """The request could not be done.

    Attributes
    ----------
    status : a ``Status`` of ``kernelcat.store.measurement``, or :data:`SKIPPED`
    detail : why, for the user
    max_error : largest error against the oracle, where ``status`` is ``wrong``
    fatal : the child ends after this reply
    """

    status: str
    detail: str
    max_error: float | None = None
    fatal: bool = False


@dataclass(frozen=True)
class Greeting:
    """What a measuring process says of its GPU: the SKU, the environment, the timer's regimes."""

    gpu: str
    environment: Mapping[str, Any]
    regimes: tuple[str, ...]


@dataclass(frozen=True)
class Hello(Request[Greeting]):
    """Asks a measuring process for its GPU."""


@dataclass(frozen=True)
class Placed:
    """The problem's arrays are on the device: ``copies`` of them rotate, of ``bytes`` each.

    ``l2`` is ``cold`` when the copies together are large enough that none stays in the L2 cache,
    else ``warm``.
    """

    copies: int
    bytes: int
    l2: str


@dataclass(frozen=True)
class Place(Request[Placed]):
    """Asks to draw the problem's inputs, compute the oracle and put the copies on the device."""

    problem: Problem


@dataclass(frozen=True)
class Passed:
    """The gate accepted the result. ``sqnr_db`` is None where no input is quantized."""

    max_error: float | None
    sqnr_db: float | None


@dataclass(frozen=True)
class Verify(Request[Passed]):
    """Asks to judge the candidate's result for the inputs of ``seed``."""

    candidate: Candidate
    seed: int


@dataclass(frozen=True)
class Timing:
    """Microseconds a run, one sample a block, with what the chip did, of a right result."""

    samples: tuple[float, ...]
    readings: tuple[Reading, ...] = ()
    max_error: float | None = None
    sqnr_db: float | None = None


@dataclass(frozen=True)
class Screen(Request[Timing]):
    """Asks to judge the candidate on one seed and to time it for ``budget_us`` microseconds.

    ``best_us`` is the fastest candidate's time so far: a far slower one is timed once.
    """

    candidate: Candidate
    budget_us: float
    best_us: float | None


@dataclass(frozen=True)
class Raced:
    """What became of every contestant of a race."""

    outcomes: Mapping[Candidate, Timing | Failed]


@dataclass(frozen=True)
class Race(Request[Raced]):
    """Asks to race the candidates in interleaved blocks, then to judge what they wrote."""

    candidates: tuple[Candidate, ...]
    regime: str
    state: str
    seed: int


@dataclass(frozen=True)
class Built:
    """The candidate compiles: for each of its launches the numbers of the artifact's metadata."""

    steps: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Build(Request[Built]):
    """Asks a compiling process to build the candidate for ``gpu`` into the disk cache."""

    problem: Problem
    candidate: Candidate
    gpu: Gpu
