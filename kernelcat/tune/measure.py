"""Measuring on the GPUs of this machine: one queue of problems, a thread and a worker for each GPU.

A problem is screened and raced on one GPU: only times from one race in one process are comparable.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Stopped
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.problem import ProblemTune, Tools
from kernelcat.tune.supervisor import Supervisor

SCREENING_SHARE = 0.75
"""Fraction of a problem's share of the budget after which screening ends and the race begins."""

HOST_TIMED = ("eager",)
"""Regimes whose times include the host's: beside such a race nothing is compiled."""

Choose = Callable[[ProblemTune], list[Candidate]]
"""Chooses the candidates for one problem."""


def largest_first(entry: Entry, problems: Sequence[Problem], gpu: Gpu) -> list[Problem]:
    """``problems`` sorted by the roofline, so that no GPU starts a long problem last."""

    def roofline(problem: Problem) -> float:
        dtype = str(problem.values.get(entry.tolerance_axis, "float32"))
        return gpu.roofline_us(entry.flops(problem), entry.bytes_moved(problem), dtype)

    return sorted(problems, key=roofline, reverse=True)


class Queue:
    """Problems that wait for one of ``num_gpus`` GPUs, and the time that remains for them."""

    def __init__(self, problems: Sequence[Problem], num_gpus: int, budget_s: float | None) -> None:
        self.waiting, self.num_gpus = deque(problems), num_gpus
        self.end = time.monotonic() + (budget_s if budget_s is not None else float("inf"))
        self.lock = threading.Lock()

    def take(self) -> tuple[Problem, float] | None:
        """The next problem and the end of its screening (``time.monotonic``); None at the end.

        Each GPU will take the same number of the waiting problems, and each problem gets an equal
        share of the time that remains.
        """
        with self.lock:
            if not self.waiting:
                return None
            now = time.monotonic()
            share = (self.end - now) / max(1.0, len(self.waiting) / self.num_gpus)
            return self.waiting.popleft(), now + SCREENING_SHARE * share

    def peek(self) -> Problem | None:
        """The problem that will be taken next; None at the end."""
        with self.lock:
            return self.waiting[0] if self.waiting else None


class Ahead:
    """Compiles candidates of the problem that waits, while the one before it is verified and raced.

    The compiled kernels are in the disk cache when the problem has its turn.
    """

    def __init__(self, tools: Tools, queue: Queue, choose: Choose) -> None:
        self.tools, self.queue, self.choose = tools, queue, choose
        self.is_over = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts to compile for the next problem, if there is one."""
        problem = self.queue.peek()
        if problem is not None and not set(self.tools.regimes) & set(HOST_TIMED):
            self.is_over.clear()
            self.thread = threading.Thread(target=self._compile, args=(problem,), daemon=True)
            self.thread.start()

    def end(self) -> None:
        """Gives the compiling processes back; waits for the candidates that compile now."""
        self.is_over.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _compile(self, problem: Problem) -> None:
        tuning = ProblemTune(self.tools, problem)
        known = tuning.history.failed.keys() | tuning.history.times.keys()
        candidates = [each for each in self.choose(tuning) if each not in known]
        with suppress(Stopped):
            for _ in self.tools.pool.build(problem, candidates):
                if self.is_over.is_set():
                    return


def measure(
    supervisors: Sequence[Supervisor],
    pool: CompilePool,
    make_tools: Callable[[Supervisor], Tools],
    problems: Sequence[Problem],
    budget_s: float | None,
    choose: Choose,
) -> None:
    """Tunes ``problems`` on all GPUs at the same time, with the report and store of ``make_tools``.

    If a GPU is lost, the other GPUs go on with the queue, and then the error is raised. Ctrl-C
    stops all GPUs. Nothing runs any more when this function returns or raises. ``budget_s`` is in
    seconds; None is no limit.
    """
    with ThreadPoolExecutor(len(supervisors)) as threads:
        try:
            tools_of_gpus = list(threads.map(make_tools, supervisors))
            queue = Queue(problems, len(supervisors), budget_s)
            jobs = [threads.submit(_work, tools, queue, choose) for tools in tools_of_gpus]
            wait(jobs)
            for job in jobs:
                job.result()
        except BaseException:
            pool.close()  # ends the threads that wait for the pool
            raise
        finally:
            for supervisor in supervisors:
                supervisor.close()


def _work(tools: Tools, queue: Queue, choose: Choose) -> None:
    """Tunes one problem after the other on one GPU, until the queue is empty."""
    ahead = Ahead(tools, queue, choose)
    for problem, deadline in iter(queue.take, None):
        tuning = ProblemTune(tools, problem, deadline)
        tools.report.problems.append(tuning.report)
        tools.progress.finished(tuning.run(choose(tuning), ahead.begin))
        ahead.end()
    tools.progress.phase("done")
