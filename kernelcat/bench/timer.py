"""Timers: CUDA graphs with events, and the host clock."""

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
"""Upper limit of the runs in one graph."""
GRAPH_US = 1000.0
"""Microseconds that a graph takes: long, so that the gap between two replays is negligible."""

Memory = Callable[[], AbstractContextManager[Any]]
"""A context in which a graph is captured. What a peer allocates in the context stays reserved while
the value that the context yields is alive."""


class Timed(Protocol):
    """A kernel that is ready to be timed: bound to every rotating copy, and warmed up.

    ``estimate_us``: microseconds of one run, from one short measurement.
    """

    estimate_us: float

    def block(self, target_us: float, during: Callable[[], None] | None = None) -> float:
        """Runs for about ``target_us`` microseconds; returns microseconds of one run.

        ``during`` is called once, while the runs are still going on where the timer can do so.
        """
        ...

    def one_pass(self) -> float:
        """Runs on every copy once, in the way that is timed; returns microseconds of one run."""
        ...

    def first_run(self) -> float:
        """Runs on the first copy once; returns microseconds, with the start of a still GPU."""
        ...


class Timer(Protocol):
    """Prepares callables for timing. ``regimes`` are the regimes that the timer supports."""

    regimes: tuple[str, ...]

    def prepare(self, runs: Sequence[Run], regime: str) -> Timed:
        """Prepares one kernel; ``runs`` has one callable for each rotating copy of the arrays."""
        ...


class Eager:
    """Times launches from Python, one after the other, until the last has finished.

    ``clock`` returns seconds.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        synchronize: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runs, self.synchronize, self.clock = runs, synchronize, clock
        self.one_pass()
        self.estimate_us = self.one_pass()

    def one_pass(self) -> float:
        return self._time(1, None)

    def first_run(self) -> float:
        self.synchronize()
        start = self.clock()
        self.runs[0]()
        self.synchronize()
        return (self.clock() - start) * 1e6

    def block(self, target_us: float, during: Callable[[], None] | None = None) -> float:
        return self._time(num_repeats(target_us, self.estimate_us * len(self.runs)), during)

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


def num_repeats(target_us: float, one_us: float) -> int:
    """Number of repetitions of ``one_us`` that fill ``target_us`` microseconds; at least 1."""
    return max(1, math.ceil(target_us / max(one_us, 0.01)))


class Graph:
    """A captured CUDA graph over all copies, replayed between two events.

    A CUDA graph holds addresses only. This object keeps the memory at these addresses alive:
    ``runs`` hold their arrays, and ``memory`` holds what the runs allocated during the capture.
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
            self._capture(1, runs[:1])
            self.first = self.graph
            self._capture(1)
            self.single = self.graph
            short_us = self.one_pass()
            repeats = min(
                num_repeats(GRAPH_US, short_us * len(runs)), max(1, MAX_NODES // len(runs))
            )
            if repeats > 1:
                self._capture(repeats)
        self.estimate_us = self._time(self.graph, 1, None) / self.nodes

    def _capture(self, repeats: int, runs: Sequence[Run] | None = None) -> None:
        runs = self.runs if runs is None else runs
        self.nodes = repeats * len(runs)
        self.stream.begin_capture()  # in CuPy's default mode, relaxed, peers may allocate
        try:
            for _ in range(repeats):
                for run in runs:
                    run()
        finally:
            self.graph = self.stream.end_capture()
        self.graph.upload(self.stream)
        self.graph.launch(self.stream)
        self.stream.synchronize()

    def one_pass(self) -> float:
        return self._time(self.single, 1, None) / len(self.runs)

    def first_run(self) -> float:
        return self._time(self.first, 1, None)

    def block(self, target_us: float, during: Callable[[], None] | None = None) -> float:
        replays = num_repeats(target_us, self.estimate_us * self.nodes)
        return self._time(self.graph, replays, during) / (replays * self.nodes)

    def _time(self, graph: Any, replays: int, during: Callable[[], None] | None) -> float:
        """Microseconds of ``replays`` replays of ``graph``."""
        self.start.record(self.stream)
        for _ in range(replays):
            graph.launch(self.stream)
        self.end.record(self.stream)
        if during:
            during()
        self.end.synchronize()
        return float(self.elapsed_ms(self.start, self.end)) * 1e3


class CudaTimer:
    """Times on one CuPy stream, which becomes the current stream of the thread for good.

    ``memory`` makes the context of each capture. The default reserves nothing: our own kernels
    allocate nothing.
    """

    regimes = REGIMES
    memory: Memory = staticmethod(nullcontext)

    def __init__(self, device: CudaDevice) -> None:
        self.cupy = device.xp
        self.stream = device.xp.cuda.Stream(non_blocking=True)
        self.stream.use()

    def prepare(self, runs: Sequence[Run], regime: str) -> Timed:
        # After a with statement of another stream, CuPy's current stream is the default one.
        self.stream.use()
        if regime == "graph":
            return Graph(runs, self.stream, self.cupy, self.memory)
        # Of the whole device: also work on other streams counts.
        return Eager(runs, self.cupy.cuda.runtime.deviceSynchronize)


class HostTimer:
    """Times with a host clock, for devices whose runs are synchronous Python functions.

    ``clock`` returns seconds.
    """

    regimes = ("eager",)

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    def prepare(self, runs: Sequence[Run], regime: str) -> Timed:
        return Eager(runs, lambda: None, self.clock)
