"""Engines of several ranks behind the interface of `Engine`, for programs that call `step`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kernelcat.moe.engine.engine import Engine, EngineError, RequestOutput
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.statistics import Statistics
from kernelcat.moe.parallel import expert_processes
from kernelcat.moe.parallel.expert_statistics import ExpertStatistics
from kernelcat.moe.parallel.router import Router
from kernelcat.moe.profile import NUM_STEPS, StepProfile, check_file, profile_decoding
from kernelcat.moe.serve.engine_messages import (
    Open,
    Outputs,
    Profile,
    ReadStatistics,
    Refused,
    Stop,
    Submit,
    Wake,
)
from kernelcat.moe.serve.engine_pipe import EnginePipe
from kernelcat.moe.source import ModelSource


@dataclass
class Submitted:
    """A request of `SteppedRanks`; ``num_written`` and ``finish_reason`` follow its outputs."""

    id: str
    rank: int
    num_written: int = 0
    finish_reason: FinishReason | None = None


class SteppedRanks:
    """A process for each rank, of which `step` returns what is new.

    Parameters and errors are those of `ExpertEngines`. Nobody but one thread calls its methods.

    Attributes
    ----------
    limits : of each rank's engine
    """

    def __init__(
        self, source: ModelSource, settings: EngineSettings, ranks: int, rebalance_every: int = 0
    ) -> None:
        self._folder, self._pipes = expert_processes.start(
            source,
            ranks,
            rebalance_every,
            lambda member: EnginePipe(Open(source, settings, member)),
        )
        try:
            self.limits, *_ = [pipe.wait_until_ready() for pipe in self._pipes]
        except BaseException:
            self._kill()
            raise
        self._router = Router(ranks, settings.page_size)
        self._requests: dict[str, Submitted] = {}
        self._ids = itertools.count()
        self._outputs: list[RequestOutput] = []
        self._statistics: dict[int, ExpertStatistics] = {}
        self._profile: StepProfile | None = None
        self._reason = ""

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes' guards, with which the processes end."""
        return [pipe.process_id for pipe in self._pipes]

    def submit(
        self,
        prompt: Sequence[int],
        parameters: SamplingParameters | None = None,
        *,
        request_id: str | None = None,
        needs_text: bool = True,
    ) -> Submitted:
        """Sends a request to one of the ranks; `step` raises what the rank refuses."""
        rank = self._router.start(prompt)
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        request = self._requests[name] = Submitted(name, rank)
        parameters = parameters or SamplingParameters()
        for other, pipe in enumerate(self._pipes):
            message = Submit(name, list(prompt), parameters, needs_text, None, "")
            pipe.send(message if other == rank else Wake())
        return request

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Waits until a rank has sent something, and returns all that is new.

        Raises
        ------
        KernelcatError
            A rank has refused a request, or has ended.
        """
        if not self._outputs:
            self._receive()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _receive(self) -> None:
        """Takes a message of each rank that has sent one, of which there is one at least."""
        ready = wait([pipe.connection for pipe in self._pipes])
        for rank, pipe in enumerate(self._pipes):
            if pipe.connection in ready:
                try:
                    self._take(rank, pipe.receive())
                except EOFError:
                    self._kill()
                    reason = self._reason or f"the process of rank {rank} has ended"
                    raise EngineError(reason) from None

    def _take(self, rank: int, message: Any) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._account(output)
            self._outputs += message.outputs
        elif isinstance(message, ExpertStatistics):
            self._statistics[rank] = message
        elif isinstance(message, StepProfile):
            self._profile = message
        elif isinstance(message, Refused) and message.request_id:
            self._end(self._requests[message.request_id])
            raise message.error
        elif isinstance(message, Refused):
            self._reason = str(message.error)

    def _account(self, output: RequestOutput) -> None:
        request = self._requests[output.request_id]
        request.num_written += len(output.tokens)
        request.finish_reason = output.finish_reason
        if output.finish_reason is not None:
            self._end(request)

    def _end(self, request: Submitted) -> None:
        del self._requests[request.id]
        self._router.end(request.rank)

    def statistics(self) -> Statistics:
        """The numbers of all ranks together; raises ``EngineError`` if a rank has ended."""
        self._statistics.clear()
        for pipe in self._pipes:
            pipe.send(ReadStatistics())
        while len(self._statistics) < len(self._pipes):
            self._receive()
        return ExpertStatistics.together([self._statistics[r] for r in range(len(self._pipes))])

    def profile_decoding(
        self, prompts: Sequence[Sequence[int]], trace: Path, num_steps: int = NUM_STEPS
    ) -> StepProfile:
        """As `kernelcat.moe.profile.profile_decoding`, of rank 0 while all ranks write on.

        Prompt i is a request of rank i modulo the ranks. No other request runs. Experts that change
        places meanwhile do so in recorded steps.

        Raises
        ------
        KernelcatError
            The file cannot be written.
        EngineError
            A rank has ended, a request has failed, or the context is so short that one has ended;
            all processes have ended then.
        """
        check_file(trace)
        self._profile = None
        for rank, pipe in enumerate(self._pipes):
            own = [list(prompt) for prompt in prompts[rank :: len(self._pipes)]]
            pipe.send(Profile(own, len(prompts), trace, num_steps))
        while self._profile is None:
            self._receive()
        return self._profile

    def close(self) -> None:
        """Ends all processes; requests that run get no further output."""
        for pipe in self._pipes:
            pipe.send(Stop())
        for pipe in self._pipes:
            pipe.join()
        self._folder.cleanup()

    def _kill(self) -> None:
        for pipe in self._pipes:
            pipe.kill()
        self._folder.cleanup()


def profile_steps(
    engine: Engine | SteppedRanks,
    prompts: Sequence[Sequence[int]],
    trace: Path,
    num_steps: int = NUM_STEPS,
) -> StepProfile:
    """`profile_decoding` of an engine in this process, or of rank 0 of several processes.

    Raises what `kernelcat.moe.profile.profile_decoding` and `SteppedRanks.profile_decoding` raise.
    """
    if isinstance(engine, SteppedRanks):
        return engine.profile_decoding(prompts, trace, num_steps)
    return profile_decoding(engine, prompts, trace, num_steps)
