"""Recording: which problems a program calls, how often, and their share of the time.

Calls cost nothing while nobody records (`wrapping`). Times are not taken from the program's own
calls. Events around an eager launch measure the host's gaps as well, and what a graph replays
cannot be seen. A problem's time is the measured one of the database, or follows from the cost
model.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

from kernelcat.call import wrapping
from kernelcat.call.choice import Decision
from kernelcat.call.wrapping import Launch
from kernelcat.catalog.spec import Problem
from kernelcat.errors import StoreError
from kernelcat.runtime import driver
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import workload
from kernelcat.store.workload import Basis, Use

VARIABLE = "KERNELCAT_RECORD"
"""Environment variable that names a file; the whole process is recorded there."""

FLUSH_S = 30.0
"""Seconds between two writes while a program runs; a program that is killed loses at most these."""


class ThreadTally:
    """Calls and captured calls of one thread."""

    __slots__ = ("calls", "captured", "query")

    def __init__(self) -> None:
        self.calls = self.captured = 0
        self.query = driver.opened().capture_query()


class Tally:
    """Calls and captured calls of a use, by thread: threads never write the same number."""

    __slots__ = ("threads", "use", "written")

    def __init__(self, use: Use) -> None:
        self.use = use
        self.threads: dict[int, ThreadTally] = defaultdict(ThreadTally)
        self.written = (0, 0)

    def counts(self) -> tuple[int, int]:
        """Calls and captured calls so far."""
        threads = [*self.threads.values()]
        return sum(each.calls for each in threads), sum(each.captured for each in threads)

    def counted(self, launch: Launch) -> Launch:
        """``launch`` that also counts."""
        threads = self.threads

        def run(pointers: tuple[int, ...], stream: int) -> None:
            launch(pointers, stream)
            mine = threads[get_ident()]
            query = mine.query
            if query.stream != stream:
                query.turn_to(stream)
            if query.ask() or not query.status.value:
                mine.calls += 1
            else:
                mine.captured += 1

        return run


class Recorder:
    """Counts the calls of this process, and adds the counts to the workload in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the program may change its folder
        self._tallies: dict[tuple[str, ...], Tally] = {}
        self._warned = False
        self._exit: Any = None
        self._after_fork()

    def _after_fork(self) -> None:
        """Begin at zero: what was counted before belongs to the process that forked."""
        for tally in self._tallies.values():
            tally.written = tally.counts()
        self._writing = threading.Lock()
        self._stopped = threading.Event()

    def wrap(
        self, launch: Launch, problem: Problem, gpu: Gpu, device: int, decision: Decision
    ) -> Launch:
        """``launch`` that also counts, for the problem that ``decision`` serves."""
        us, basis = time_of(problem, gpu, decision)
        chosen, config = decision.implementation.name, dict(decision.config)
        use = Use(problem.entry, problem.values, gpu.sku, chosen, config, decision.why, us, basis)
        return self._tallies.setdefault(use.key, Tally(use)).counted(launch)

    def start(self) -> None:
        """Record from now on; ``StoreError`` where the file cannot be written."""
        import multiprocessing.util

        workload.add(self.path, ())
        wrapping.start(self)
        multiprocessing.util.register_after_fork(self, Recorder._flush_at_exit)
        self._flush_at_exit()
        self._start_thread()

    def stop(self) -> None:
        """Record no more, and write; ``StoreError`` where the file cannot be written."""
        wrapping.stop(self)
        self._stopped.set()
        self._exit.cancel()
        self.flush()

    def flush(self) -> None:
        """Add what was counted since the last time to the file."""
        with self._writing:
            counts = {tally: tally.counts() for tally in [*self._tallies.values()]}
            news = [
                replace(tally.use, calls=calls - tally.written[0],
                        captured=captured - tally.written[1])
                for tally, (calls, captured) in counts.items()
                if (calls, captured) != tally.written
            ]  # fmt: skip
            if news:
                workload.add(self.path, news)
            for tally, written in counts.items():
                tally.written = written

    def _flush_or_warn(self) -> None:
        try:
            self.flush()
        except StoreError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"calls are not recorded: {error}", stacklevel=2)

    def _flush_at_exit(self) -> None:
        """Write when this process ends; workers of multiprocessing end without ``atexit``."""
        import multiprocessing.util

        self._exit = multiprocessing.util.Finalize(None, self._flush_or_warn, exitpriority=0)

    def _start_thread(self) -> None:
        stopped = self._stopped

        def run() -> None:
            while not stopped.wait(FLUSH_S):
                self._flush_or_warn()

        threading.Thread(target=run, name="kernelcat-record", daemon=True).start()

    def go_on_after_fork(self) -> None:
        """Record in a process that was forked while this recorder was active."""
        self._after_fork()
        self._flush_at_exit()
        self._start_thread()


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write every problem that this process calls in a ``with`` block to the workload ``path``.

    The file gets a line for each problem, GPU and kernel that served it: JSON with the number of
    calls and the device time of one call. Counts are added to those that the file has. Calls of all
    threads count, and those of processes that are forked in the block. A call that a CUDA graph
    captures counts once, as captured; replays of the graph are not seen.
    ``KERNELCAT_RECORD=FILE`` records a whole process, and all processes that it starts.

    Raises
    ------
    StoreError
        The file cannot be written, or is no workload.
    """
    recorder = Recorder(Path(path))
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()


def time_of(problem: Problem, gpu: Gpu, decision: Decision) -> tuple[float, Basis]:
    """Device time of one call in microseconds, and what the time rests on."""
    row, estimate = decision.evidence, decision.implementation.estimate
    here = estimate(problem, decision.config, gpu)
    if row is None or row.kind != "measured":
        return here, "predicted"
    if decision.why == "exact":
        return row.median_us, "measured"
    where = gpu if row.gpu == gpu.sku else gpus.find(row.gpu)
    return row.median_us * here / estimate(row.problem, row.config, where), "scaled"


def _go_on_after_fork() -> None:
    for watcher in wrapping.active:
        if isinstance(watcher, Recorder):
            watcher.go_on_after_fork()


def _start_from_environment() -> None:
    path = os.environ.get(VARIABLE)
    if path:
        try:
            Recorder(Path(path)).start()
        except StoreError as error:
            warnings.warn(f"{VARIABLE}: calls are not recorded: {error}", stacklevel=2)


os.register_at_fork(after_in_child=_go_on_after_fork)
_start_from_environment()
