"""The parent's side of measuring: owns the clock, and replaces a worker that hangs or dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelcat.catalog.spec import Problem
from kernelcat.errors import LaunchError, MissingDependency
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout, Message, Stopped


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
        self.placed: Message | None = None
        self.starts = 0
        self.closed = False

    @property
    def restarts(self) -> int:
        """How often the process was lost and started again."""
        return max(0, self.starts - 1)

    def hello(self) -> Message:
        """Start the worker; what it says of its GPU.

        Raises
        ------
        MissingDependency, LaunchError
            When it cannot work on this machine.
        """
        self.channel = Channel("kernelcat.tune.worker", self.spec, str(self.index))
        self.starts += 1
        if self.closed:  # too early for close() to see the channel
            self.channel.kill()
        reply = self._ask("hello", self.limits.start_s)
        if reply["status"] == "skipped":
            raise MissingDependency(reply["detail"])
        if reply["status"] != "passed":
            raise LaunchError(f"the measuring process does not start: {reply['detail']}")
        return reply

    def place(self, problem: Problem) -> Message:
        """Put ``problem`` on the device; the reply's status tells whether it fits."""
        self.problem, self.placed = problem, None
        return self._ready()

    def screen(self, candidate: Candidate, effort_us: float, best_us: float | None) -> Message:
        """The gate, then a short timing."""
        return self._about(candidate, "screen", budget_us=effort_us, best_us=best_us)

    def verify(self, candidate: Candidate, seed: int) -> Message:
        """The gate on another seed."""
        return self._about(candidate, "verify", seed=seed)

    def race(
        self, candidates: Sequence[Candidate], regime: str, state: str, seed: int
    ) -> tuple[Message, Candidate | None]:
        """Race; the reply, and who is to blame when the whole race was lost."""
        peers = any(candidate.is_peer for candidate in candidates)
        reply = self._placed(
            "race", self.limits.peer_s if peers else self.limits.candidate_s,
            lanes=[c.key for c in candidates], regime=regime, state=state, seed=seed,
        )  # fmt: skip
        if reply["status"] == "passed":
            return reply, None
        key = reply.get("announced")
        return reply, Candidate.parse(key) if key else None

    def close(self) -> None:
        """End the worker for good, whatever it is doing."""
        self.closed = True
        channel = self.channel
        if channel:
            channel.kill()

    def _about(self, candidate: Candidate, op: str, **args: Any) -> Message:
        limit = self.limits.peer_s if candidate.is_peer else self.limits.candidate_s
        return self._placed(op, limit, lane=candidate.key, **args)

    def _placed(self, op: str, timeout: float, **args: Any) -> Message:
        ready = self._ready()
        if ready["status"] != "passed":  # nobody's fault here: the problem fitted before
            raise LaunchError(f"the GPU does not recover: {ready['detail']}; what was measured is "
                              "kept, start the tune again")  # fmt: skip
        return self._ask(op, timeout, **args)

    def _ready(self) -> Message:
        """A living worker with the problem on its device."""
        assert self.problem is not None
        if self.channel is None:
            self.hello()
        if self.placed is None:
            reply = self._ask("problem", self.limits.prepare_s, entry=self.problem.entry,
                              axes=self.problem.values)  # fmt: skip
            self.placed = reply if reply["status"] == "passed" else None
            return reply
        return self.placed

    def _ask(self, op: str, timeout: float, **args: Any) -> Message:
        assert self.channel is not None
        channel = self.channel
        try:
            reply = channel.request(op, timeout, **args)
        except (ChildTimeout, ChildDied) as error:
            if self.closed:
                raise Stopped from error
            status = "timeout" if isinstance(error, ChildTimeout) else "crashed"
            reply = {"status": status, "detail": str(error), "fatal": True}
        if reply.get("fatal"):
            channel.kill()
            self.channel, self.placed = None, None
        return {**reply, "announced": channel.announced}
