"""The measuring process: ``python -m kernelcat.tune.worker BACKEND DEVICE``.

The worker has one GPU and the arrays of one problem at a time, and answers the supervisor.
If a kernel makes the worker hang or crash, or corrupts the CUDA context, then only one candidate
fails: the supervisor starts another worker.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernelcat.bench.race import Contestant, copies_needed, race
from kernelcat.bench.states import STATES
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
        self.copies: list[Any] = []
        self.prepared: dict[int, gate.Prepared] = {}

    def answer(self, request: Request[Any]) -> Any:
        """The reply to ``request``; an exception becomes a :class:`Failed`."""
        verbs: dict[type, Callable[[Any], Any]] = {
            Hello: self.hello, Place: self.place, Screen: self.screen, Verify: self.verify,
            Race: self.race,
        }  # fmt: skip
        try:
            return verbs[type(request)](request)
        except Exception as error:
            failed = failure(error)
        return failed if self.healthy() else replace(failed, status="crashed", fatal=True)

    def hello(self, request: Hello) -> Greeting:
        """The SKU of the GPU, the environment, and the regimes of the timer."""
        gpu = self.device.gpu
        environment = Environment.capture(gpu, self.index).to_json()
        return Greeting(gpu.sku, environment, tuple(self.timer.regimes))

    def place(self, request: Place) -> Placed:
        """Draws inputs, computes the oracle, and puts the rotating copies on the device."""
        self.clear()
        self.problem = request.problem
        self.entry: Entry = self.backend.entry(self.problem.entry)
        first = self._prepared(0)
        copy_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in first.arrays.values())
        moved_bytes = min(copy_bytes, self.entry.bytes_moved(self.problem))
        l2_bytes, free_bytes = self.device.gpu.l2_bytes, self.backend.free_bytes(self.device)
        count = copies_needed(moved_bytes, copy_bytes, l2_bytes, free_bytes)
        self.copies = [first.arrays]
        if count > 1:
            self.copies += gate.allocate(self.entry, self.problem, self.device, 0, count - 1)
        self.device.synchronize()
        is_cold = count * moved_bytes >= 3 * l2_bytes
        return Placed(count, copy_bytes, "cold" if is_cold else "warm")

    def clear(self) -> None:
        """Frees the arrays and the loaded kernels of the current problem."""
        self.binds, self.copies, self.prepared = {}, [], {}
        self.backend.release(self.device)

    def screen(self, request: Screen) -> Timing:
        """Checks the candidate on one seed, then times it for a short while."""
        # Not put into self.binds: the workspaces of a candidate may be large.
        bind = self._load(request.candidate)
        verdict = self._check(request.candidate, bind, 0)
        timed = self._timed(bind, self.timer.regimes[0])
        contestant = Contestant(timed)
        best_us = request.best_us
        is_hopeless = best_us is not None and timed.estimate_us > HOPELESS_FACTOR * best_us
        if is_hopeless:
            contestant.samples.append(timed.estimate_us)
        for _ in range(0 if is_hopeless else SCREEN_BLOCKS):
            contestant.run(request.budget_us / SCREEN_BLOCKS, self.sampler)
        return self._timing(contestant, verdict)

    def verify(self, request: Verify) -> Passed:
        """Checks the candidate on another seed."""
        candidate = request.candidate
        verdict = self._check(candidate, self._bind(candidate), request.seed)
        return Passed(verdict.max_error, verdict.sqnr_db)

    def race(self, request: Race) -> Raced:
        """Races the candidates, then checks what the timed runs themselves wrote."""
        contestants = {}
        for candidate in request.candidates:
            self.announce(candidate)
            contestants[candidate] = Contestant(self._timed(self._bind(candidate), request.regime))
        race(contestants, self.sampler, STATES[request.state], seed=request.seed,
             announce=self.announce)  # fmt: skip
        return Raced({c: self._judge_raced(c, contestant) for c, contestant in contestants.items()})

    def _judge_raced(self, candidate: Candidate, contestant: Contestant) -> Timing | Failed:
        """The times of a contestant, if its timed runs wrote the right result to every copy."""
        self.announce(candidate)
        run, copies = contestant.timed.once, self.copies[1:]
        verdict = self._prepared(0).verify_run(run, peer=candidate.is_peer, copies=copies)
        if not verdict.passed:
            return Failed("wrong", f"after the timed runs: {verdict.detail}")
        try:
            return self._timing(contestant, verdict)
        except Rejected as error:
            return failure(error)

    def _check(self, candidate: Candidate, bind: Bind, seed: int) -> gate.Verdict:
        verdict = self._prepared(seed).verify(bind, peer=candidate.is_peer)
        if not verdict.passed:
            raise Rejected("wrong", verdict.detail, verdict.max_error)
        return verdict

    def _prepared(self, seed: int) -> gate.Prepared:
        """Inputs and oracle of ``seed``. Only seed 0 and the last other seed stay in memory."""
        if seed not in self.prepared:
            for other in [s for s in self.prepared if s != 0]:
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

    def _timed(self, bind: Bind, regime: str) -> Timed:
        """A kernel bound to every copy, ready to be timed."""
        return self.timer.prepare([bind(arrays) for arrays in self.copies], regime)

    def _timing(self, contestant: Contestant, verdict: gate.Verdict) -> Timing:
        """Samples and readings; raises :class:`Rejected` for a time below the roofline."""
        gpu, entry = self.device.gpu, self.entry
        dtype = str(self.problem.values.get(entry.tolerance_axis, "float32"))
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
