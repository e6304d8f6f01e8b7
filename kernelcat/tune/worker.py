"""The measuring process: ``python -m kernelcat.tune.worker BACKEND DEVICE``.

The worker holds one GPU and one problem at a time, and answers the supervisor's requests. Whatever
a kernel does to the worker (hang, crash, corrupt its context) costs one candidate: the supervisor
starts another worker.
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

HOPELESS = 5.0
"""A candidate this many times slower than the best is timed once and left alone."""
SCREEN_BLOCKS = 3


class Worker:
    """One device, and the problem whose arrays lie on it now."""

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
        """The reply to ``request``; whatever goes wrong becomes a status."""
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
        """What GPU this is, in what environment."""
        gpu = self.device.gpu
        environment = Environment.capture(gpu, self.index).to_json()
        return Greeting(gpu.sku, environment, tuple(self.timer.regimes))

    def place(self, request: Place) -> Placed:
        """Draw inputs, compute the oracle and lay out the rotating copies."""
        self.clear()
        self.at = request.problem
        self.entry: Entry = self.backend.entry(self.at.entry)
        first = self._prepared(0)
        one = sum(math.prod(a.shape) * a.dtype.itemsize for a in first.arrays.values())
        moved = min(one, self.entry.bytes_moved(self.at))
        free = self.backend.free_bytes(self.device)
        count = copies_needed(moved, one, self.device.gpu.l2_bytes, free)
        more = gate.allocate(self.entry, self.at, self.device, 0, count - 1) if count > 1 else []
        self.copies = [first.arrays, *more]
        self.device.synchronize()
        cold = count * moved >= 3 * self.device.gpu.l2_bytes
        return Placed(count, one, "cold" if cold else "warm")

    def clear(self) -> None:
        self.binds, self.copies, self.prepared = {}, [], {}
        self.backend.release(self.device)

    def screen(self, request: Screen) -> Timing:
        """The gate on one seed, then a short timing."""
        bind = self._load(request.candidate)  # not kept: its workspaces may be large
        verdict = self._gate(request.candidate, bind, 0)
        timed = self._timed(bind, self.timer.regimes[0])
        contestant = Contestant(timed)
        best_us = request.best_us
        hopeless = best_us is not None and timed.estimate_us > HOPELESS * best_us
        if hopeless:
            contestant.samples.append(timed.estimate_us)
        for _ in range(0 if hopeless else SCREEN_BLOCKS):
            contestant.run(request.budget_us / SCREEN_BLOCKS, self.sampler)
        return self._timing(contestant, verdict)

    def verify(self, request: Verify) -> Passed:
        """The gate on another seed; only the last one stays prepared."""
        candidate = request.candidate
        verdict = self._gate(candidate, self._bind(candidate), request.seed)
        return Passed(verdict.max_error, verdict.sqnr_db)

    def race(self, request: Race) -> Raced:
        """Race the candidates, then judge once more what the timed runs themselves wrote."""
        contestants = {}
        for candidate in request.candidates:
            self.announce(candidate)
            contestants[candidate] = Contestant(self._timed(self._bind(candidate), request.regime))
        race(contestants, self.sampler, STATES[request.state], seed=request.seed,
             announce=self.announce)  # fmt: skip
        return Raced({c: self._after(c, contestant) for c, contestant in contestants.items()})

    def _after(self, candidate: Candidate, contestant: Contestant) -> Timing | Failed:
        self.announce(candidate)
        run, copies = contestant.timed.once, self.copies[1:]
        verdict = self._prepared(0).verify_run(run, peer=candidate.is_peer, copies=copies)
        if not verdict.passed:
            return Failed("wrong", f"after the timed runs: {verdict.detail}")
        try:
            return self._timing(contestant, verdict)
        except Rejected as error:
            return failure(error)

    def _gate(self, candidate: Candidate, bind: Bind, seed: int) -> gate.Verdict:
        verdict = self._prepared(seed).verify(bind, peer=candidate.is_peer)
        if not verdict.passed:
            raise Rejected("wrong", verdict.detail, verdict.max_error)
        return verdict

    def _prepared(self, seed: int) -> gate.Prepared:
        if seed not in self.prepared:
            for other in [s for s in self.prepared if s != 0]:
                del self.prepared[other]
            self.prepared[seed] = gate.prepare(self.entry, self.at, self.device, seed)
        return self.prepared[seed]

    def _bind(self, candidate: Candidate) -> Bind:
        if candidate not in self.binds:
            self.binds[candidate] = self._load(candidate)
        return self.binds[candidate]

    def _load(self, candidate: Candidate) -> Bind:
        if candidate.is_peer:
            peer = next(p for p in self.entry.peers if p.name == candidate.variant)
            return self.backend.bind_peer(self.entry, self.at, self.timer, peer.load())
        for implementation in self.backend.implementations(self.entry.name):
            owner = (implementation.language, implementation.variant)
            if owner == (candidate.language, candidate.variant):
                return self.device.load(implementation, self.at, candidate.config)
        raise Rejected("launch_error", f"{candidate} is not in the catalog")

    def _timed(self, bind: Bind, regime: str) -> Timed:
        return self.timer.prepare([bind(arrays) for arrays in self.copies], regime)

    def _timing(self, contestant: Contestant, verdict: gate.Verdict) -> Timing:
        """Samples and readings; a time below the roofline floor is an error, not a record."""
        gpu, work = self.device.gpu, self.entry
        dtype = str(self.at.values.get(work.tolerance_axis, "float32"))
        floor = gpu.roofline_us(work.flops(self.at), work.bytes_moved(self.at), dtype)
        samples = tuple(contestant.samples)
        fastest = sorted(samples)[len(samples) // 2]
        if fastest < floor:
            raise Rejected(
                "wrong", f"{fastest:.3f} us is below the roofline floor of {floor:.3f} us"
            )
        readings = tuple(contestant.readings)
        return Timing(samples, readings, verdict.max_error, verdict.sqnr_db)

    def healthy(self) -> bool:
        """Whether the device still answers: an illegal access poisons its context for good."""
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
    except Exception as error:  # sent to the supervisor, which raises it again
        cannot_start = replace(failure(error), fatal=True)
        server.serve(lambda request: cannot_start)
        return
    with telemetry.sampler(worker.backend.pci_bus_id(worker.device)) as worker.sampler:
        server.serve(worker.answer)


if __name__ == "__main__":
    main()
