"""Messages between the server and the process of its engine, pickled over a pipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcat.moe.engine.engine import RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.pages_out import Destination
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.statistics import Statistics
from kernelcat.moe.parallel.expert_member import ExpertMember
from kernelcat.moe.profile import StepProfile
from kernelcat.moe.source import ModelSource

if TYPE_CHECKING:
    from kernelcat.moe.disaggregate.side import Side

# ---- to the engine ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """The first message: which engine. Answered by `Ready` or `Refused`.

    ``member`` is the rank whose engine it is, if several ranks divide the experts; ``side`` says
    which of two engines it is, if one computes prompts and one writes. Both are None for an engine
    that does all.
    """

    source: ModelSource
    settings: EngineSettings
    member: ExpertMember | None = None
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """A request as in `Engine.submit`; ``grammar`` is the text of a `Grammar`, or None.

    A decode engine also gets ``num_queued``, the tokens of prompts that the prefill engine has to
    compute. Answered by `Outputs` with outputs of the request, or by `Refused`.
    """

    request_id: str
    prompt: list[int]
    parameters: SamplingParameters
    needs_text: bool
    grammar: str | None
    salt: str
    destination: Destination | None = None
    num_queued: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request; no output follows.

    From a prefill engine an output without tokens follows, when it writes none of the request's
    pages any more.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """To a decode engine: the output of the prefill engine, whose pages have all been written."""

    output: RequestOutput


@dataclass(frozen=True)
class Wake:
    """A rank has got a request: of ranks in lockstep, all others get this message."""


@dataclass(frozen=True)
class ReadStatistics:
    """Answered by `Statistics`."""


@dataclass(frozen=True)
class Profile:
    """To all ranks in lockstep: record decode steps, as `LockstepEngine.profile` does.

    ``prompts`` are those of the rank, ``batch`` counts those of all ranks. The ranks begin when
    none of them has work. Rank 0 answers with a `StepProfile`.
    """

    prompts: list[list[int]]
    batch: int
    trace: Path
    num_steps: int


@dataclass(frozen=True)
class Stop:
    """Ends all requests, which get a last output, and then the process."""


ToEngine = Open | Submit | Cancel | Arrived | Wake | ReadStatistics | Profile | Stop

# ---- from the engine ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The engine runs."""

    limits: Limits


@dataclass(frozen=True)
class Refused:
    """A request (or with id "" the engine itself) is not possible."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step adds to requests."""

    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A decode engine has pages for a request: the prefill engine shall compute its prompt."""

    request_id: str
    destination: Destination


FromEngine = Ready | Refused | Outputs | Wanted | Statistics | StepProfile
