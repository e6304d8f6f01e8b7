"""The measuring process: ``python -m kernelcat.tune.worker BACKEND DEVICE``.

It holds one GPU and one problem at a time, and answers the supervisor's requests. Whatever a
kernel does to it (hang, crash, corrupt its context) costs one candidate: the supervisor starts
another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kernelcat.bench.race import Lane, copies_needed, race
from kernelcat.bench.states import STATES
from kernelcat.bench.timer import Timed
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime import telemetry
from kernelcat.runtime.device import Bind
from kernelcat.runtime.environment import Environment
from kernelcat.tune import backend as backends
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Message, Server
from kernelcat.tune.failure import Rejected, failure
from kernelcat.verify import gate

HOPELESS = 5.0
"""A candidate this many times slower than the best is timed once and left alone."""
SCREEN_BLOCKS = 3


class Bench:
    """One device, and the problem that lies on it now."""

    def __init__(self, spec: str, index: int, announce: Callable[[str], None]) -> None:
        self.backend = backends.load(spec)
        self.index, self.announce = index, announce
        self.device = self.backend.device(index)
        self.timer = self.backend.timer(self.device)
        self.sampler: Any = telemetry.Silent()
        self.binds: dict[str, Bind] = {}
        self.copies: list[Any] = []
        self.prepared: dict[int, gate.Prepared] = {}

    def hello(self) -> Message:
        gpu = self.device.gpu
        environment = Environment.capture(gpu, self.index).to_json()
        return {"gpu": gpu.sku, "environment": environment, "regimes": list(self.timer.regimes)}

    def problem(self, entry: str, axes: Mapping[str, Any]) -> Message:
        """Draw inputs, compute the oracle and lay out the rotating copies."""
        self.clear()
        self.entry: Entry = self.backend.entry(entry)
        self.at = Problem.of(entry, **axes)
        first = self._prepared(0)
        one = sum(math.prod(a.shape) * a.dtype.itemsize for a in first.arrays.values())
        moved = min(one, self.entry.bytes_moved(self.at))
        free = self.backend.free_bytes(self.device)
        count = copies_needed(moved, one, self.device.gpu.l2_bytes, free)
        more = gate.allocate(self.entry, self.at, self.device, 0, count - 1) if count > 1 else []
        self.copies = [first.arrays, *more]
        self.device.synchronize()
        cold = count * moved >= 3 * self.device.gpu.l2_bytes
        return {"copies": count, "bytes": one, "l2": "cold" if cold else "warm"}

    def clear(self) -> None:
        self.binds, self.copies, self.prepared = {}, [], {}
        self.backend.release(self.device)

    def screen(self, lane: str, budget_us: float, best_us: float | None) -> Message:
        """The gate on one seed, then a short timing."""
        bind = self._load(Candidate.parse(lane))  # not kept: its workspaces may be large
        verdict = self._gate(lane, bind, 0)
        timed = self._timed(bind, self.timer.regimes[0])
        entrant = Lane(timed)
        hopeless = best_us is not None and timed.estimate_us > HOPELESS * best_us
        if hopeless:
            entrant.samples.append(timed.estimate_us)
        for _ in range(0 if hopeless else SCREEN_BLOCKS):
            entrant.run(budget_us / SCREEN_BLOCKS, self.sampler)
        return {**self._timing(entrant), **_accuracy(verdict)}

    def verify(self, lane: str, seed: int) -> Message:
        """The gate on another seed; only the last one stays prepared."""
        return _accuracy(self._gate(lane, self._bind(lane), seed))

    def race(self, lanes: list[str], regime: str, state: str, seed: int) -> Message:
        """Race ``lanes``, then judge once more what the timed runs themselves write."""
        entrants = {}
        for key in lanes:
            self.announce(key)
            entrants[key] = Lane(self._timed(self._bind(key), regime))
        race(entrants, self.sampler, STATES[state], seed=seed, announce=self.announce)
        return {"lanes": {key: self._after(key, lane) for key, lane in entrants.items()}}

    def _after(self, key: str, lane: Lane) -> Message:
        self.announce(key)
        try:
            peer = Candidate.parse(key).is_peer
            run, copies = lane.timed.once, self.copies[1:]
            verdict = self._prepared(0).verify_run(run, peer=peer, copies=copies)
            if not verdict.passed:
                raise Rejected("wrong", f"after the timed runs: {verdict.detail}")
            return {**self._timing(lane), **_accuracy(verdict)}
        except Rejected as error:
            return {"status": error.status, "detail": str(error)}

    def _gate(self, lane: str, bind: Bind, seed: int) -> gate.Verdict:
        verdict = self._prepared(seed).verify(bind, peer=Candidate.parse(lane).is_peer)
        if not verdict.passed:
            raise Rejected("wrong", verdict.detail, verdict.max_error)
        return verdict

    def _prepared(self, seed: int) -> gate.Prepared:
        if seed not in self.prepared:
            for other in [s for s in self.prepared if s != 0]:
                del self.prepared[other]
            self.prepared[seed] = gate.prepare(self.entry, self.at, self.device, seed)
        return self.prepared[seed]

    def _bind(self, lane: str) -> Bind:
        if lane not in self.binds:
            self.binds[lane] = self._load(Candidate.parse(lane))
        return self.binds[lane]

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

    def _timing(self, lane: Lane) -> Message:
        """Samples and readings; a time below the roofline floor is an error, not a record."""
        gpu, work = self.device.gpu, self.entry
        dtype = str(self.at.values.get(work.tolerance_axis, "float32"))
        floor = gpu.roofline_us(work.flops(self.at), work.bytes_moved(self.at), dtype)
        fastest = sorted(lane.samples)[len(lane.samples) // 2]
        if fastest < floor:
            raise Rejected(
                "wrong", f"{fastest:.3f} us is below the roofline floor of {floor:.3f} us"
            )
        readings = [reading.to_json() for reading in lane.readings]
        return {"status": "passed", "samples": lane.samples, "readings": readings}

    def healthy(self) -> bool:
        """Whether the device still answers: an illegal access poisons its context for good."""
        try:
            self.device.synchronize()
        except Exception:
            return False
        return True


def _accuracy(verdict: gate.Verdict) -> Message:
    return {"max_error": verdict.max_error, "sqnr_db": verdict.sqnr_db}


def handler(bench: Bench) -> Callable[[Message], Message]:
    """Requests to methods of ``bench``; whatever goes wrong becomes a status."""
    verbs = {"hello": bench.hello, "problem": bench.problem, "screen": bench.screen,
             "verify": bench.verify, "race": bench.race}  # fmt: skip

    def handle(request: Message) -> Message:
        verb: Any = verbs[request.pop("op")]
        try:
            return {"status": "passed", **verb(**request)}
        except Exception as error:
            reply = failure(error)
        if not bench.healthy():
            reply |= {"status": "crashed", "fatal": True}
        return reply

    return handle


def main() -> None:
    spec, index = sys.argv[1], int(sys.argv[2])
    server = Server()
    try:
        bench = Bench(spec, index, server.announce)
    except Exception as error:  # told to the supervisor, which raises it again
        reply = {**failure(error), "fatal": True}
        server.serve(lambda request: reply)
        return
    with telemetry.sampler(bench.backend.pci_bus_id(bench.device)) as bench.sampler:
        server.serve(handler(bench))


if __name__ == "__main__":
    main()
