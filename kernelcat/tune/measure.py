"""Measuring on the GPUs of this machine: one queue of problems, a thread and a worker for each GPU.

A problem is screened and raced entirely on one GPU, since only a race in one process compares.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.problem import ProblemTune, Tools
from kernelcat.tune.supervisor import Supervisor

SCREENING_SHARE = 0.75
"""Part of a problem's share of the budget after which screening stops and the race begins."""

Choose = Callable[[ProblemTune], list[Candidate]]


def largest_first(entry: Entry, problems: Sequence[Problem], gpu: Gpu) -> list[Problem]:
    """By the roofline, so that no GPU begins a long one when the others are done."""

    def roofline(problem: Problem) -> float:
        dtype = str(problem.values.get(entry.tolerance_axis, "float32"))
        return gpu.roofline_us(entry.flops(problem), entry.bytes_moved(problem), dtype)

    return sorted(problems, key=roofline, reverse=True)


class Queue:
    """Problems that wait for one of ``num_gpus`` GPUs, and the time that is left for them."""

    def __init__(self, problems: Sequence[Problem], num_gpus: int, budget_s: float | None) -> None:
        self.waiting, self.num_gpus = deque(problems), num_gpus
        self.end = time.monotonic() + (budget_s if budget_s is not None else float("inf"))
        self.lock = threading.Lock()

    def take(self) -> tuple[Problem, float] | None:
        """The next problem and when (``time.monotonic``) its screening ends; None when all ran.

        Each GPU has its part of those waiting to do, and each of them gets an equal share.
        """
        with self.lock:
            if not self.waiting:
                return None
            now = time.monotonic()
            share = (self.end - now) / max(1.0, len(self.waiting) / self.num_gpus)
            return self.waiting.popleft(), now + SCREENING_SHARE * share


def measure(
    supervisors: Sequence[Supervisor],
    pool: CompilePool,
    equip: Callable[[Supervisor], Tools],
    problems: Sequence[Problem],
    budget_s: float | None,
    choose: Choose,
) -> None:
    """Fill the report and the store that ``equip`` gives to each GPU, all GPUs at a time.

    A GPU that is lost is an error, once the others have done what they can; Ctrl-C stops them
    all. Nothing runs any more when this returns or raises.
    """
    with ThreadPoolExecutor(len(supervisors)) as threads:
        try:
            equipped = list(threads.map(equip, supervisors))
            queue = Queue(problems, len(supervisors), budget_s)
            jobs = [threads.submit(_work, tools, queue, choose) for tools in equipped]
            wait(jobs)
            for job in jobs:
                job.result()
        except BaseException:
            pool.close()  # threads that wait for it must end too
            raise
        finally:
            for supervisor in supervisors:
                supervisor.close()


def _work(tools: Tools, queue: Queue, choose: Choose) -> None:
    """What one GPU does: a problem after the other."""
    for problem, deadline in iter(queue.take, None):
        tuning = ProblemTune(tools, problem, deadline)
        tools.report.problems.append(tuning.report)
        tuning.run(choose(tuning))
    tools.progress.phase("done")
