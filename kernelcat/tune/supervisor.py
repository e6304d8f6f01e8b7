"""The parent's side of measuring: the supervisor replaces a worker that hangs or dies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelcat.catalog.spec import Problem
from kernelcat.errors import LaunchError, MissingDependency
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout, Stopped
from kernelcat.tune.messages import (
    SKIPPED,
    Failed,
    Greeting,
    Hello,
    Passed,
    Place,
    Placed,
    Race,
    Reply,
    Request,
    Screen,
    Timing,
    Verify,
)


@dataclass(frozen=True)
class Limits:
    """Seconds without an answer after which something counts as hung."""

    start_s: float = 180.0
    prepare_s: float = 300.0
    candidate_s: float = 20.0
    peer_s: float = 120.0
    compile_s: float = 180.0


class Supervisor:
    """A measuring process per GPU that is started again, problem included, when it is lost.

    One thread asks; another may ``close`` it meanwhile, which raises ``Stopped`` in the first.
    """

    def __init__(self, spec: str, index: int = 0, limits: Limits | None = None) -> None:
        self.spec, self.index = spec, index
        self.limits = limits or Limits()
        self.channel: Channel | None = None
        self.problem: Problem | None = None
        self.placed: Placed | None = None
        self.culprit: Candidate | None = None  # what the worker said last that it runs
        self.starts = 0
        self.closed = False

    @property
    def restarts(self) -> int:
        """How often the process was lost and started again."""
        return max(0, self.starts - 1)

    def hello(self) -> Greeting:
        """Start the worker; what the worker says of its GPU.

        Raises
        ------
        MissingDependency, LaunchError
            When the worker cannot work on this machine.
        """
        self.channel = Channel("kernelcat.tune.worker", self.spec, str(self.index))
        self.starts += 1
        if self.closed:  # too early for close() to see the channel
            self.channel.kill()
        reply = self._ask(Hello(), self.limits.start_s)
        if not isinstance(reply, Failed):
            return reply
        if reply.status == SKIPPED:
            raise MissingDependency(reply.detail)
        raise LaunchError(f"the measuring process does not start: {reply.detail}")

    def place(self, problem: Problem) -> Placed | Failed:
        """Put ``problem`` on the device; ``Failed`` when its arrays cannot be prepared."""
        self.problem, self.placed = problem, None
        return self._ready()

    def screen(
        self, candidate: Candidate, effort_us: float, best_us: float | None
    ) -> Timing | Failed:
        """The gate, then a short timing."""
        return self._on_device(Screen(candidate, effort_us, best_us), self._limit(candidate))

    def verify(self, candidate: Candidate, seed: int) -> Passed | Failed:
        """The gate on another seed."""
        return self._on_device(Verify(candidate, seed), self._limit(candidate))

    def race(
        self, candidates: Sequence[Candidate], regime: str, state: str, seed: int
    ) -> Mapping[Candidate, Timing | Failed]:
        """Race; how each candidate did. When the whole race was lost, only who is to blame."""
        reply = self._on_device(
            Race(tuple(candidates), regime, state, seed), max(map(self._limit, candidates))
        )
        if not isinstance(reply, Failed):
            return reply.outcomes
        return {self.culprit: reply} if self.culprit else {}

    def close(self) -> None:
        """End the worker for good, whatever it is doing."""
        self.closed = True
        channel = self.channel
        if channel:
            channel.kill()

    def _limit(self, candidate: Candidate) -> float:
        return self.limits.peer_s if candidate.is_peer else self.limits.candidate_s

    def _on_device(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        """Ask about the problem that was placed."""
        ready = self._ready()
        if isinstance(ready, Failed):  # nobody's fault here: the problem fitted before
            raise LaunchError(f"the GPU does not recover: {ready.detail}; what was measured is "
                              "kept, start the tune again")  # fmt: skip
        return self._ask(request, timeout)

    def _ready(self) -> Placed | Failed:
        """A living worker with the problem on its device."""
        assert self.problem is not None
        if self.channel is None:
            self.hello()
        if self.placed is None:
            reply = self._ask(Place(self.problem), self.limits.prepare_s)
            if isinstance(reply, Failed):
                return reply
            self.placed = reply
        return self.placed

    def _ask(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        assert self.channel is not None
        channel = self.channel
        reply: Reply | Failed
        try:
            reply = channel.request(request, timeout)
        except (ChildTimeout, ChildDied) as error:
            if self.closed:
                raise Stopped from error
            status = "timeout" if isinstance(error, ChildTimeout) else "crashed"
            reply = Failed(status, str(error), fatal=True)
        self.culprit = channel.announced
        if isinstance(reply, Failed) and reply.fatal:
            channel.kill()
            self.channel, self.placed = None, None
        return reply
