"""The measuring process: ``python -m kernelcat.tune.worker BACKEND DEVICE``.

The worker has one GPU and the arrays of one problem at a time, and answers the supervisor.
If a kernel makes the worker hang or crash, or corrupts the CUDA context, then only one candidate
fails: the supervisor starts another worker.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kernelcat.bench.race import Contestant, copies_needed, race
from kernelcat.bench.timer import Timed
from kernelcat.catalog.spec import Entry
from kernelcat.runtime import telemetry
from kernelcat.runtime.device import Bind
from kernelcat.runtime.environment import Environment
from kernelcat.tune import backend as backends
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Server
from kernelcat.tune.failure import Rejected, failure
from kernelcat.tune.messages import (
    Clear,
    Cleared,
    Failed,
    Greeting,
    Hello,
    Passed,
    Place,
    Placed,
    Race,
    Raced,
    Request,
    Screen,
    Timing,
    Verify,
)
from kernelcat.tune.referee import Referee
from kernelcat.verify import gate

HOPELESS_FACTOR = 5.0
"""A candidate whose time is over this factor times the best time is timed only once."""
SCREEN_BLOCKS = 3
"""Blocks in which a candidate is timed in screening."""


class Worker:
    """One device, with the arrays of the current problem."""

    def __init__(self, spec: str, index: int, announce: Callable[[Candidate], None]) -> None:
        self.backend = backends.load(spec)
        self.index, self.announce = index, announce
        self.device = self.backend.device(index)
        self.timer = self.backend.timer(self.device)
        self.sampler: Any = telemetry.NoTelemetry()
        self.binds: dict[Candidate, Bind] = {}
        self.copies: list[gate.Prepared] = []
        self.seed = 0  # of the inputs that the copies hold
        self.prepared: dict[int, gate.Prepared] = {}

    def answer(self, request: Request[Any]) -> Any:
        """The reply to ``request``; an exception becomes a :class:`Failed`."""
        verbs: dict[type, Callable[[Any], Any]] = {
            Hello: self.hello, Place: self.place, Screen: self.screen, Verify: self.verify,
            Race: self.race, Clear: self.clear,
        }  # fmt: skip
        try:
            return verbs[type(request)](request)
        except Exception as error:
            failed = failure(error)
        if not self.healthy():
            return replace(failed, status="crashed", fatal=True)
        self._reset_copies()
        return failed

    def hello(self, request: Hello) -> Greeting:
        """The SKU of the GPU, the environment, and the regimes of the timer."""
        gpu = self.device.gpu
        environment = Environment.capture(gpu, self.index).to_json()
        return Greeting(gpu.sku, environment, tuple(self.timer.regimes))

    def place(self, request: Place) -> Placed:
        """Draws inputs, computes the oracle, and puts the rotating copies on the device."""
        self.clear(Clear())
        self.problem = request.problem
        self.entry: Entry = self.backend.entry(self.problem.entry)
        self.seed = request.seed
        first = self._prepared(self.seed)
        copy_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in first.arrays.values())
        moved_bytes = min(copy_bytes, self.entry.bytes_moved(self.problem))
        l2_bytes, free_bytes = self.device.gpu.l2_bytes, self.backend.free_bytes(self.device)
        count = copies_needed(moved_bytes, copy_bytes, l2_bytes, free_bytes)
        self.copies = [first, *(first.copy() for _ in range(count - 1))]
        self.device.synchronize()
        is_cold = count * moved_bytes >= 3 * l2_bytes
        return Placed(count, copy_bytes, "cold" if is_cold else "warm")

    def clear(self, request: Clear) -> Cleared:
        """Frees the arrays and the loaded kernels of the current problem."""
        self.binds, self.copies, self.prepared = {}, [], {}
        self.backend.release(self.device)
        return Cleared()

    def screen(self, request: Screen) -> Timing:
        """Checks the candidate on one seed, then times and judges the candidate for a while."""
        # Not put into self.binds: the workspaces of a candidate may be large.
        bind = self._load(request.candidate)
        referee = self._referee([self.seed], self.seed)
        verdict = self._check(request.candidate, bind, self.seed)
        timed = self._timed(bind, self.timer.regimes[0])
        contestant = Contestant(timed)
        best_us = request.best_us
        is_hopeless = best_us is not None and timed.estimate_us > HOPELESS_FACTOR * best_us
        if is_hopeless:
            contestant.samples.append(timed.estimate_us)
        for block in range(0 if is_hopeless else SCREEN_BLOCKS):
            referee.before(request.candidate, block)
            contestant.run(request.budget_us / SCREEN_BLOCKS, self.sampler)
            if not referee.after(request.candidate, timed.one_pass):
                detail = referee.failed[request.candidate].detail
                raise Rejected("wrong", f"seed {self.seed}, after the timed runs: {detail}")
        return self._timing(contestant, verdict)

    def verify(self, request: Verify) -> Passed:
        """Checks the candidate on one seed, once for each pattern of guard bands."""
        candidate, verdict = request.candidate, gate.Verdict(True, 0.0)
        for poison in gate.BANDS:
            again = self._check(candidate, self._bind(candidate), request.seed, poison)
            verdict = verdict.with_another(again)
        return Passed(verdict.max_error, verdict.sqnr_db)

    def race(self, request: Race) -> Raced:
        """Races the candidates, and judges the memory between and after the timed blocks."""
        referee = self._referee([self.seed, request.other_seed], request.seed)
        self._reset_copies()
        contestants = {}
        for candidate in request.candidates:
            self.announce(candidate)
            contestants[candidate] = Contestant(self._timed(self._bind(candidate), request.regime))
        race(contestants, self.sampler, self.backend.state(request.state), seed=request.seed,
             announce=self.announce, referee=referee)  # fmt: skip
        referee.draws = referee.draws[:1]  # frees the others
        return Raced({c: self._judge_raced(c, contestants[c], referee, request)
                      for c in contestants})  # fmt: skip

    def _referee(self, seeds: Sequence[int], seed: int) -> Referee:
        """A referee with the inputs of ``seeds``, or of the first alone if memory is full."""
        draws = [self._prepared(seeds[0])]
        with contextlib.suppress(MemoryError):
            draws += [self._prepared(other) for other in seeds[1:]]
        return Referee(self.copies, draws, seed)

    def _judge_raced(
        self,
        candidate: Candidate,
        contestant: Contestant,
        referee: Referee,
        request: Race,
    ) -> Timing | Failed:
        """The times of a contestant, if its timed runs wrote the right result to every copy."""
        self.announce(candidate)
        verdict = referee.failed.get(candidate)
        verdict = verdict or referee.judge_new_inputs(
            candidate,
            contestant.samples,
            self._device_timed(candidate, contestant, request.regime),
            lambda number: self._prepared(request.new_seeds[number]),
        )
        if not verdict.passed:
            return Failed("wrong", f"after the timed runs: {verdict.detail}")
        try:
            return self._timing(contestant, verdict)
        except Rejected as error:
            return failure(error)

    def _check(
        self, candidate: Candidate, bind: Bind, seed: int, poison: int = gate.POISON
    ) -> gate.Verdict:
        verdict = self._prepared(seed).verify(bind, peer=candidate.is_peer, poison=poison)
        if not verdict.passed:
            raise Rejected("wrong", f"seed {seed}: {verdict.detail}", verdict.max_error)
        return verdict

    def _prepared(self, seed: int) -> gate.Prepared:
        """Inputs and oracle of ``seed``. Only those of the copies and the last others stay."""
        if seed not in self.prepared:
            for other in [s for s in self.prepared if s != self.seed]:
                del self.prepared[other]
            self.prepared[seed] = gate.prepare(self.entry, self.problem, self.device, seed)
        return self.prepared[seed]

    def _bind(self, candidate: Candidate) -> Bind:
        if candidate not in self.binds:
            self.binds[candidate] = self._load(candidate)
        return self.binds[candidate]

    def _load(self, candidate: Candidate) -> Bind:
        if candidate.is_peer:
            peer = next(p for p in self.entry.peers if p.name == candidate.variant)
            return self.backend.bind_peer(self.entry, self.problem, self.timer, peer.load())
        for implementation in self.backend.implementations(self.entry.name):
            owner = (implementation.language, implementation.variant)
            if owner == (candidate.language, candidate.variant):
                return self.device.load(implementation, self.problem, candidate.config)
        raise Rejected("launch_error", f"{candidate} is not in the catalog")

    def _reset_copies(self) -> None:
        """Gives the copies their own inputs back.

        An earlier candidate was judged on others, or may have changed them unseen, and a peer may
        read its inputs when it is bound.
        """
        for copy in self.copies:
            copy.reset()

    def _timed(self, bind: Bind, regime: str) -> Timed:
        """A kernel bound to every copy, ready to be timed."""
        return self.timer.prepare([bind(copy.arrays) for copy in self.copies], regime)

    def _device_timed(self, candidate: Candidate, contestant: Contestant, regime: str) -> Timed:
        """The runs of a contestant, in the timer's first regime: with device times if it has them.

        A peer that cannot be timed in this regime is judged as it was raced.
        """
        first = self.timer.regimes[0]
        if regime == first:
            return contestant.timed
        self._reset_copies()
        try:
            return self._timed(self._bind(candidate), first)
        except Exception:
            if not candidate.is_peer:
                raise
            return contestant.timed

    def _timing(self, contestant: Contestant, verdict: gate.Verdict) -> Timing:
        """Samples and readings; raises :class:`Rejected` for a time below the roofline."""
        gpu, entry = self.device.gpu, self.entry
        dtype = entry.product_dtype(self.problem)
        floor = gpu.roofline_us(entry.flops(self.problem), entry.bytes_moved(self.problem), dtype)
        samples = tuple(contestant.samples)
        median = sorted(samples)[len(samples) // 2]
        if median < floor:
            raise Rejected(
                "wrong", f"{median:.3f} us is below the roofline floor of {floor:.3f} us"
            )
        readings = tuple(contestant.readings)
        return Timing(samples, readings, verdict.max_error, verdict.sqnr_db)

    def healthy(self) -> bool:
        """Whether the device still works: after an illegal access the CUDA context never does."""
        try:
            self.device.synchronize()
        except Exception:
            return False
        return True


def main() -> None:
    spec, index = sys.argv[1], int(sys.argv[2])
    server = Server()
    try:
        worker = Worker(spec, index, server.announce)
    except Exception as error:  # sent to the supervisor, which raises an error
        cannot_start = replace(failure(error), fatal=True)
        server.serve(lambda request: cannot_start)
        return
    with telemetry.sampler(worker.backend.pci_bus_id(worker.device)) as worker.sampler:
        server.serve(worker.answer)


if __name__ == "__main__":
    main()
