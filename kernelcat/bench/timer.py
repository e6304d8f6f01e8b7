"""Timing backends: CUDA graphs and events, or the host clock where there is no GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from kernelcat.runtime.device import CudaDevice, Run

REGIMES = ("graph", "eager")
"""``graph``: device time inside a CUDA graph. ``eager``: host time included."""

MAX_NODES = 4096
"""Launches one graph may hold."""
GRAPH_US = 1000.0
"""A graph is made about this long, so that the gap between two replays does not count."""

Memory = Callable[[], AbstractContextManager[Any]]
"""Within it, what others' code allocates is kept apart for as long as its value lives."""


class Timed(Protocol):
    """Something ready to be timed: every rotating copy bound, warm, captured.

    ``estimate_us``: microseconds of one run, from one short look.
    """

    estimate_us: float

    def block(self, target_us: float, during: Callable[[], None] | None = None) -> float:
        """Run for about ``target_us``; microseconds of one run. ``during`` is called meanwhile."""
        ...

    def once(self) -> None:
        """Run every copy once, exactly as it is timed."""
        ...


class Timer(Protocol):
    """Makes callables timeable. ``regimes`` are those it can tell apart."""

    regimes: tuple[str, ...]

    def prepare(self, runs: Sequence[Run], regime: str) -> Timed:
        """``runs`` holds one callable per rotating copy of the arrays."""
        ...


class Eager:
    """Launches from Python one after the other; the clock stops when the last has finished."""

    def __init__(
        self,
        runs: Sequence[Run],
        synchronize: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runs, self.synchronize, self.clock = runs, synchronize, clock
        self.once()
        synchronize()
        self.estimate_us = self._time(1, None)

    def once(self) -> None:
        for run in self.runs:
            run()

    def block(self, target_us: float, during: Callable[[], None] | None = None) -> float:
        return self._time(rounds(target_us, self.estimate_us * len(self.runs)), during)

    def _time(self, repeats: int, during: Callable[[], None] | None) -> float:
        runs = self.runs
        self.synchronize()
        start = self.clock()
        for _ in range(repeats):
            for run in runs:
                run()
        self.synchronize()
        elapsed = self.clock() - start
        if during:
            during()
        return elapsed * 1e6 / (repeats * len(runs))


def rounds(target_us: float, one_us: float) -> int:
    """How many repetitions of something that takes ``one_us`` fill ``target_us``; at least 1."""
    return max(1, math.ceil(target_us / max(one_us, 0.01)))


class Graph:
    """A captured CUDA graph over all copies, replayed between two events.

    A graph knows addresses alone. It keeps ``runs``, whose arrays lie there, and what the runs
    allocated while they were captured stays in the ``memory`` of their own.
    """

    def __init__(
        self, runs: Sequence[Run], stream: Any, cupy: Any, memory: Memory = nullcontext
    ) -> None:
        self.runs, self.stream = runs, stream
        self.start, self.end = cupy.cuda.Event(), cupy.cuda.Event()
        self.elapsed_ms = cupy.cuda.get_elapsed_time
        with memory() as self.memory:
            for run in runs:
                run()
            stream.synchronize()
            self._capture(1)
            short_us = self._time(1, None)
            repeats = min(rounds(GRAPH_US, short_us * len(runs)), max(1, MAX_NODES // len(runs)))
            if repeats > 1:
                self._capture(repeats)
        self.estimate_us = self._time(1, None)

    def _capture(self, repeats: int) -> None:
        self.nodes = repeats * len(self.runs)
        self.stream.begin_capture()  # CuPy's default mode is relaxed: peers may allocate
        try:
            for _ in range(repeats):
                for run in self.runs:
                    run()
        finally:
            self.graph = self.stream.end_capture()
        self.graph.upload(self.stream)
        self.once()
        self.stream.synchronize()

    def once(self) -> None:
        self.graph.launch(self.stream)

    def block(self, target_us: float, during: Callable[[], None] | None = None) -> float:
        return self._time(rounds(target_us, self.estimate_us * self.nodes), during)

    def _time(self, replays: int, during: Callable[[], None] | None) -> float:
        self.start.record(self.stream)
        for _ in range(replays):
            self.graph.launch(self.stream)
        self.end.record(self.stream)
        if during:
            during()
        self.end.synchronize()
        return float(self.elapsed_ms(self.start, self.end)) * 1e3 / (replays * self.nodes)


class CudaTimer:
    """Times on one CuPy stream, which it makes the current one of this thread for good.

    ``memory`` is entered around what is captured; our own kernels allocate nothing.
    """

    regimes = REGIMES
    memory: Memory = staticmethod(nullcontext)

    def __init__(self, device: CudaDevice) -> None:
        self.cupy = device.xp
        self.stream = device.xp.cuda.Stream(non_blocking=True)
        self.stream.use()

    def prepare(self, runs: Sequence[Run], regime: str) -> Timed:
        if regime == "graph":
            return Graph(runs, self.stream, self.cupy, self.memory)
        return Eager(runs, self.stream.synchronize)


class HostTimer:
    """A host clock (seconds), for devices whose runs are synchronous Python functions."""

    regimes = ("eager",)

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    def prepare(self, runs: Sequence[Run], regime: str) -> Timed:
        return Eager(runs, lambda: None, self.clock)
