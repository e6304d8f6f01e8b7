"""The parent's side of measuring: a supervisor that restarts a worker that hangs or dies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryFile

from kernelcat.catalog.spec import Problem
from kernelcat.errors import LaunchError, MissingDependency
from kernelcat.jit import cache
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout, Link, Start, Stopped
from kernelcat.tune.failure import MAX_TRIES, lost_child, tried_again
from kernelcat.tune.messages import (
    SKIPPED,
    Clear,
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

    def for_cache(self) -> tuple[Limits, list[str]]:
        """These limits and no notes if compiled kernels can be kept; else longer limits and why.

        Without the cache a measuring process compiles each candidate itself.
        """
        folder = cache.folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                return self, []
        except OSError as error:
            note = f"{folder} cannot be written ({error.strerror}): every kernel is compiled twice"
            return replace(self, candidate_s=self.candidate_s + self.compile_s), [note]


class Supervisor:
    """A measuring process for GPU ``index``, which is restarted when it hangs or dies.

    The restarted process gets the arrays of the current problem again. One thread makes requests.
    Another thread may call ``close``, which raises ``Stopped`` in the first thread. ``start`` is
    where the process runs; by default on this machine.
    """

    def __init__(
        self, spec: str, index: int = 0, limits: Limits | None = None, start: Start = Channel
    ) -> None:
        self.spec, self.index, self.start = spec, index, start
        self.limits = limits or Limits()
        self.channel: Link | None = None
        self.problem: Problem | None = None
        self.seed = 0
        self.placed: Placed | None = None
        self.culprit: Candidate | None = None  # the last candidate that the worker announced
        self.starts = 0
        self.closed = False

    @property
    def restarts(self) -> int:
        """How often the process was restarted."""
        return max(0, self.starts - 1)

    def hello(self, tries: int = MAX_TRIES) -> Greeting:
        """Starts the worker, up to ``tries`` times if others end it; returns its greeting.

        Raises
        ------
        MissingDependency, LaunchError
            The worker cannot work on this machine.
        """
        self.channel = self.start("kernelcat.tune.worker", self.spec, str(self.index))
        self.starts += 1
        if self.closed:  # close() ran before the channel existed
            self.channel.kill()
        reply = self._ask(Hello(), self.limits.start_s)
        if isinstance(reply, Failed) and reply.outside and tries > 1:
            return self.hello(tries - 1)
        if not isinstance(reply, Failed):
            return reply
        if reply.status == SKIPPED:
            raise MissingDependency(reply.detail)
        raise LaunchError(f"the measuring process does not start: {reply.detail}")

    def place(self, problem: Problem, seed: int = 0) -> Placed | Failed:
        """Puts the arrays of ``problem``, drawn with ``seed``, on the device.

        The reply is ``Failed`` if the arrays cannot be prepared.
        """
        self.problem, self.seed, self.placed = problem, seed, None
        return self._ready()

    def screen(
        self, candidate: Candidate, effort_us: float, best_us: float | None
    ) -> Timing | Failed:
        """Checks the candidate on one seed, then times it for ``effort_us`` microseconds.

        ``best_us`` is the fastest time so far; a much slower candidate is timed only once.
        """
        return self._on_device(Screen(candidate, effort_us, best_us), [candidate])

    def verify(self, candidate: Candidate, seed: int) -> Passed | Failed:
        """Checks the candidate on another seed."""
        return self._on_device(Verify(candidate, seed), [candidate])

    def race(
        self,
        candidates: Sequence[Candidate],
        regime: str,
        state: str,
        seed: int,
        seeds: Sequence[int],
    ) -> Mapping[Candidate, Timing | Failed]:
        """Races ``candidates``; returns the outcome of each.

        The inputs of the first of ``seeds`` take turns with those of :meth:`place`; the others are
        for the passes after the race, ``MAX_PASSES`` at most. If the race as a whole fails, only
        the failure of the candidate that ran is returned.
        """
        request = Race(tuple(candidates), regime, state, seed, seeds[0], tuple(seeds[1:]))
        reply = self._on_device(request, candidates)
        if not isinstance(reply, Failed):
            return reply.outcomes
        return {self.culprit: reply} if self.culprit and not reply.outside else {}

    def clear(self) -> None:
        """Frees the device's memory for another process. The next request places the arrays of the
        problem again."""
        self.placed = None
        if self.channel is not None:
            self._ask(Clear(), self.limits.candidate_s)

    def close(self) -> None:
        """Ends the worker for good, even in the middle of a request."""
        self.closed = True
        channel = self.channel
        if channel:
            channel.kill()

    def _limit(self, candidate: Candidate) -> float:
        """Seconds after which ``candidate`` counts as hung."""
        return self.limits.peer_s if candidate.is_peer else self.limits.candidate_s

    def _on_device(
        self, request: Request[Reply], candidates: Sequence[Candidate]
    ) -> Reply | Failed:
        """Sends a request about the current problem; a hang or a crash counts if it repeats."""
        limit = max(map(self._limit, candidates))
        return tried_again(lambda n: self._try(request, n * limit), lambda: self.culprit)

    def _try(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        ready = self._ready()
        if isinstance(ready, Failed):  # not the fault of a candidate: the arrays fitted before
            raise LaunchError(f"the GPU does not recover: {ready.detail}; what was measured is "
                              "kept, start the tune again")  # fmt: skip
        return self._ask(request, timeout)

    def _ready(self) -> Placed | Failed:
        """Makes sure that the worker runs and has the arrays of the problem on its device."""
        if self.placed is None:
            reply = tried_again(self._place)
            if isinstance(reply, Failed):
                return reply
            self.placed = reply
        return self.placed

    def _place(self, patience: int) -> Placed | Failed:
        assert self.problem is not None
        if self.channel is None:
            self.hello()
        return self._ask(Place(self.problem, self.seed), patience * self.limits.prepare_s)

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
            reply = lost_child(error)
        self.culprit = channel.announced
        if isinstance(reply, Failed) and reply.fatal:
            channel.kill()
            self.channel, self.placed = None, None
        return reply
