"""A pool of processes that compile candidates before the candidates are measured.

A compiler that crashes or never ends makes only one candidate fail.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice

from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout, Link, Start, Stopped
from kernelcat.tune.failure import lost_child, tried_again
from kernelcat.tune.messages import Build, Built, Failed

MAX_PROCESSES = 16
"""Upper limit of compiling processes for each GPU that measures."""
QUEUE_PER_PROCESS = 2
"""Candidates that wait or compile for each process: few, so that a new problem gets its turn soon,
and enough that no process is idle."""


def default_processes(num_gpus: int) -> int:
    """Number of compiling processes: one for each core, up to a limit.

    A core stays free for each further GPU, which may be racing meanwhile.
    """
    cores = (os.cpu_count() or 1) - (num_gpus - 1)
    return max(1, min(cores, MAX_PROCESSES * num_gpus))


class CompilePool:
    """Compiles candidates in ``processes`` child processes.

    A candidate that does not compile within ``timeout`` seconds fails. Several threads may call
    ``build`` at the same time; they get equal shares of the processes. ``start`` is where the
    processes run; by default on this machine.
    """

    def __init__(
        self, spec: str, gpu: Gpu, processes: int, timeout: float = 120, start: Start = Channel
    ) -> None:
        self.spec, self.gpu, self.processes, self.timeout = spec, gpu, processes, timeout
        self.start = start
        self.threads = ThreadPoolExecutor(processes)
        self.local = threading.local()
        self.channels: set[Link] = set()
        self.builds: set[object] = set()
        self.closed = False

    def build(
        self, problem: Problem, candidates: Iterable[Candidate]
    ) -> Iterator[tuple[Candidate, Built | Failed]]:
        """Yields each candidate with its :class:`Built` or :class:`Failed`, in order of completion.

        Raises
        ------
        Stopped
            The pool was closed.
        """
        for _, candidate, outcome in self.build_each((problem, c) for c in candidates):
            yield candidate, outcome

    def build_each(
        self, candidates: Iterable[tuple[Problem, Candidate]]
    ) -> Iterator[tuple[Problem, Candidate, Built | Failed]]:
        """As :meth:`build`, for candidates of several problems.

        ``candidates`` is asked for the next ones while the first are being compiled.
        """
        waiting = iter(candidates)
        jobs = dict[Future[Built | Failed], tuple[Problem, Candidate]]()
        token = object()
        self.builds.add(token)
        try:
            while True:
                share = max(1, QUEUE_PER_PROCESS * self.processes // len(self.builds))
                for job in islice(waiting, max(0, share - len(jobs))):
                    jobs[self.threads.submit(self._build, *job)] = job
                if not jobs:
                    return
                done = wait(jobs, return_when=FIRST_COMPLETED).done
                first = next(job for job in jobs if job in done)
                yield *jobs.pop(first), first.result()
        finally:
            self.builds.discard(token)
            for future in jobs:
                future.cancel()

    def close(self) -> None:
        """Ends every child at once; threads that wait for a child get ``Stopped``."""
        self.closed = True
        for channel in list(self.channels):
            channel.kill()
        self.threads.shutdown(wait=False)  # without cancelling: waiting jobs wake their threads

    def _build(self, problem: Problem, candidate: Candidate) -> Built | Failed:
        request = Build(problem, candidate, self.gpu)
        return tried_again(lambda patience: self._try(request, patience * self.timeout))

    def _try(self, request: Build, timeout: float) -> Built | Failed:
        if self.closed:
            raise Stopped
        channel = self._channel()
        try:
            return channel.request(request, timeout)
        except (ChildTimeout, ChildDied) as error:
            lost = lost_child(error)
            return self._replace(channel, replace(lost, detail=f"the compiler: {lost.detail}"))

    def _channel(self) -> Link:
        """The child process of the current thread."""
        channel: Link | None = getattr(self.local, "channel", None)
        if channel is None:
            channel = self.start("kernelcat.tune.compiler", self.spec)
            self.local.channel = channel
            self.channels.add(channel)
            if self.closed:
                channel.kill()
        return channel

    def _replace(self, channel: Link, outcome: Failed) -> Failed:
        """Drops a dead child, so that the thread starts another; returns ``outcome``."""
        if self.closed:
            raise Stopped
        channel.kill()
        self.channels.discard(channel)
        self.local.channel = None
        return outcome
