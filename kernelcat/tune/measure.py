"""Measuring on several GPUs: one queue of problems, and for each GPU a thread and a worker.

A problem is screened and raced on one GPU: only times from one race in one process are comparable.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import LaunchError
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Lost, Stopped
from kernelcat.tune.executor import Slot
from kernelcat.tune.problem import ProblemTune, Tools

SCREENING_SHARE = 0.75
"""Fraction of a problem's share of the budget after which screening ends and the race begins."""

MAX_LOSSES = 3
"""How often a problem is begun whose tune ends with an error, as when its machine is lost."""

WAKE_S = 0.5
"""Seconds after which the main thread looks for Ctrl-C: the signal may reach another thread of the
process, which does not wake the main thread."""

HOST_TIMED = ("eager",)
"""Regimes whose times include the host's: beside such a race nothing is compiled."""

Choose = Callable[[ProblemTune], list[Candidate]]
"""Chooses the candidates for one problem."""


def largest_first(entry: Entry, problems: Sequence[Problem], gpu: Gpu) -> list[Problem]:
    """``problems`` sorted by the roofline, so that no GPU starts a long problem last."""

    def roofline(problem: Problem) -> float:
        dtype = entry.product_dtype(problem)
        return gpu.roofline_us(entry.flops(problem), entry.bytes_moved(problem), dtype)

    return sorted(problems, key=roofline, reverse=True)


class Queue:
    """Problems that wait for one of ``num_gpus`` GPUs, and the time that remains for them.

    The time begins when the first problem is taken. ``given_up`` has the problems of which
    :data:`MAX_LOSSES` tunes ended with an error; ``errors`` has the errors after which a GPU was
    replaced.
    """

    def __init__(self, problems: Sequence[Problem], num_gpus: int, budget_s: float | None) -> None:
        self.waiting, self.num_gpus = deque(problems), num_gpus
        self.budget_s = float("inf") if budget_s is None else budget_s
        self.end: float | None = None
        self.num_running = 0
        self.losses: Counter[Problem] = Counter()
        self.given_up: list[Problem] = []
        self.errors: list[Exception] = []
        self.changed = threading.Condition()
        self.is_closed = False

    def take(self) -> tuple[Problem, float] | None:
        """The next problem and the end of its screening (``time.monotonic``); None at the end.

        While others run, one of them may be lost and wait again: this function waits too. Each GPU
        will take the same number of the waiting problems, and each problem gets an equal share of
        the time that remains. :meth:`turn` must follow.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.is_over())
            if self.is_over():
                return None
            now = time.monotonic()
            self.end = now + self.budget_s if self.end is None else self.end
            share = (self.end - now) / max(1.0, len(self.waiting) / self.num_gpus)
            self.num_running += 1
            return self.waiting.popleft(), now + SCREENING_SHARE * share

    @contextmanager
    def turn(self, problem: Problem) -> Iterator[None]:
        """The time in which ``problem`` is tuned; after an error the problem waits again."""
        try:
            yield
        except Exception:
            with self.changed:
                self.losses[problem] += 1
                if self.losses[problem] < MAX_LOSSES:
                    self.waiting.appendleft(problem)
                else:
                    self.given_up.append(problem)
            raise
        finally:
            with self.changed:
                self.num_running -= 1
                self.changed.notify_all()

    def peek(self) -> Problem | None:
        """The problem that will be taken next; None at the end."""
        with self.changed:
            return self.waiting[0] if self.waiting else None

    def is_over(self) -> bool:
        """Whether no problem will be taken any more."""
        return self.is_closed or not (self.waiting or self.num_running)

    def close(self) -> None:
        """No problem will be taken any more, and threads that wait for one go on."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


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
        with suppress(Stopped, Lost):
            for _ in self.tools.pool.build(problem, candidates):
                if self.is_over.is_set():
                    return


def measure(
    slots: Sequence[Slot],
    make_tools: Callable[[Slot, Callable[[], bool]], Tools | None],
    problems: Sequence[Problem],
    budget_s: float | None,
    choose: Choose,
) -> None:
    """Tunes ``problems`` on all GPUs at the same time, with the report and store of ``make_tools``.

    ``make_tools`` opens a slot; it gets a function that returns whether no problem waits any more,
    and returns None for a slot without a GPU. If a GPU is lost, its problem waits for another GPU,
    and what was measured of it stays. If the problem's GPU cannot be replaced, the error is raised
    when the other GPUs have finished the queue. Ctrl-C stops all GPUs. Nothing runs any more when
    this function returns or raises. ``budget_s`` is in seconds; None is no limit.

    Raises
    ------
    LaunchError
        There are problems left, and no GPU any more.
    """
    queue = Queue(problems, len(slots), budget_s)
    with ThreadPoolExecutor(len(slots)) as threads:
        try:
            jobs = [threads.submit(_work, slot, make_tools, queue, choose) for slot in slots]
            while wait(jobs, WAKE_S).not_done:
                pass  # Ctrl-C
        finally:
            queue.close()
            for slot in slots:
                slot.close()
    errors = [error for job in jobs if (error := job.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
    left = len(queue.waiting) + len(queue.given_up)
    if left:
        reasons = "; ".join(dict.fromkeys(map(str, queue.errors))) or "no GPU is left"
        raise LaunchError(f"{left} of {len(problems)} problems are not tuned: {reasons}. What was "
                          "measured is kept, start the tune again")  # fmt: skip


def _work(
    slot: Slot,
    make_tools: Callable[[Slot, Callable[[], bool]], Tools | None],
    queue: Queue,
    choose: Choose,
) -> None:
    """Tunes one problem after the other on one GPU, until the queue is over."""
    while True:
        try:
            tools = make_tools(slot, queue.is_over)
            if tools is not None:
                _tune_waiting(tools, queue, choose)
            return
        except Exception as error:
            if not slot.recovers(error):
                raise
            queue.errors.append(error)


def _tune_waiting(tools: Tools, queue: Queue, choose: Choose) -> None:
    ahead = Ahead(tools, queue, choose)
    for problem, deadline in iter(queue.take, None):
        with queue.turn(problem):
            tuning = ProblemTune(tools, problem, deadline)
            tools.begin(tuning)
            tools.progress.finished(tuning.run(choose(tuning), ahead.begin))
            ahead.end()
    tools.progress.phase("done")
