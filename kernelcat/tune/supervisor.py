"""The parent's side of measuring: a supervisor that restarts a worker that hangs or dies."""

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
    """Seconds without an answer after which a request counts as hung.

    Attributes
    ----------
    start_s : start of a measuring process
    prepare_s : drawing inputs and computing the oracle of a problem
    candidate_s : screening or verifying a candidate, or a step of a race
    peer_s : ``candidate_s`` for peers
    compile_s : compiling a candidate
    """

    start_s: float = 180.0
    prepare_s: float = 300.0
    candidate_s: float = 20.0
    peer_s: float = 120.0
    compile_s: float = 180.0


class Supervisor:
    """A measuring process for GPU ``index``, which is restarted when it hangs or dies.

    The restarted process gets the arrays of the current problem again. One thread makes requests.
    Another thread may call ``close``, which raises ``Stopped`` in the first thread.
    """

    def __init__(self, spec: str, index: int = 0, limits: Limits | None = None) -> None:
        self.spec, self.index = spec, index
        self.limits = limits or Limits()
        self.channel: Channel | None = None
        self.problem: Problem | None = None
        self.placed: Placed | None = None
        self.culprit: Candidate | None = None  # the last candidate that the worker announced
        self.starts = 0
        self.closed = False

    @property
    def restarts(self) -> int:
        """How often the process was restarted."""
        return max(0, self.starts - 1)

    def hello(self) -> Greeting:
        """Starts the worker; returns its greeting.

        Raises
        ------
        MissingDependency, LaunchError
            The worker cannot work on this machine.
        """
        self.channel = Channel("kernelcat.tune.worker", self.spec, str(self.index))
        self.starts += 1
        if self.closed:  # close() ran before the channel existed
            self.channel.kill()
        reply = self._ask(Hello(), self.limits.start_s)
        if not isinstance(reply, Failed):
            return reply
        if reply.status == SKIPPED:
            raise MissingDependency(reply.detail)
        raise LaunchError(f"the measuring process does not start: {reply.detail}")

    def place(self, problem: Problem) -> Placed | Failed:
        """Puts the arrays of ``problem`` on the device; ``Failed`` if they cannot be prepared."""
        self.problem, self.placed = problem, None
        return self._ready()

    def screen(
        self, candidate: Candidate, effort_us: float, best_us: float | None
    ) -> Timing | Failed:
        """Checks the candidate on one seed, then times it for ``effort_us`` microseconds.

        ``best_us`` is the fastest time so far; a much slower candidate is timed only once.
        """
        return self._on_device(Screen(candidate, effort_us, best_us), self._limit(candidate))

    def verify(self, candidate: Candidate, seed: int) -> Passed | Failed:
        """Checks the candidate on another seed."""
        return self._on_device(Verify(candidate, seed), self._limit(candidate))

    def race(
        self, candidates: Sequence[Candidate], regime: str, state: str, seed: int
    ) -> Mapping[Candidate, Timing | Failed]:
        """Races ``candidates``; returns the outcome of each.

        If the race as a whole fails, only the failure of the candidate that ran is returned.
        """
        reply = self._on_device(
            Race(tuple(candidates), regime, state, seed), max(map(self._limit, candidates))
        )
        if not isinstance(reply, Failed):
            return reply.outcomes
        return {self.culprit: reply} if self.culprit else {}

    def close(self) -> None:
        """Ends the worker for good, even in the middle of a request."""
        self.closed = True
        channel = self.channel
        if channel:
            channel.kill()

    def _limit(self, candidate: Candidate) -> float:
        """Seconds after which ``candidate`` counts as hung."""
        return self.limits.peer_s if candidate.is_peer else self.limits.candidate_s

    def _on_device(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        """Sends a request about the current problem."""
        ready = self._ready()
        if isinstance(ready, Failed):  # not the fault of a candidate: the arrays fitted before
            raise LaunchError(f"the GPU does not recover: {ready.detail}; what was measured is "
                              "kept, start the tune again")  # fmt: skip
        return self._ask(request, timeout)

    def _ready(self) -> Placed | Failed:
        """Makes sure that the worker runs and has the arrays of the problem on its device."""
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
        """Sends a request; a worker that hangs or dies is a failure of the request."""
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
