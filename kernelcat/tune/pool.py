"""The pool of compiling processes that works ahead of measuring.

A compiler that crashes or never ends costs one candidate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout, Stopped
from kernelcat.tune.messages import Build, Built, Failed

MAX_PROCESSES = 16
"""For each GPU that measures."""
AHEAD = 2
"""Candidates waiting or compiling for each process: none is idle, and no problem waits long."""


def default_processes(num_gpus: int) -> int:
    """As many as there are cores, up to a limit; the others' GPUs may race: a core for each."""
    cores = (os.cpu_count() or 1) - (num_gpus - 1)
    return max(1, min(cores, MAX_PROCESSES * num_gpus))


class CompilePool:
    """Compiles candidates in ``processes`` child processes; each has its own timeout.

    Several threads may ask at once, and get equal shares of it.
    """

    def __init__(self, spec: str, gpu: Gpu, processes: int, timeout: float = 120) -> None:
        self.spec, self.gpu, self.processes, self.timeout = spec, gpu, processes, timeout
        self.threads = ThreadPoolExecutor(processes)
        self.local = threading.local()
        self.channels: set[Channel] = set()
        self.builds: set[object] = set()
        self.closed = False

    def build(
        self, problem: Problem, candidates: Iterable[Candidate]
    ) -> Iterator[tuple[Candidate, Built | Failed]]:
        """Each candidate with how compiling went, in the order in which they are done.

        Raises
        ------
        Stopped
            After ``close``.
        """
        waiting, jobs = iter(candidates), dict[Future[Built | Failed], Candidate]()
        this = object()
        self.builds.add(this)
        try:
            while True:
                share = max(1, AHEAD * self.processes // len(self.builds))
                for candidate in islice(waiting, max(0, share - len(jobs))):
                    jobs[self.threads.submit(self._build, problem, candidate)] = candidate
                if not jobs:
                    return
                done = wait(jobs, return_when=FIRST_COMPLETED).done
                first = next(job for job in jobs if job in done)
                yield jobs.pop(first), first.result()
        finally:
            self.builds.discard(this)
            for job in jobs:
                job.cancel()

    def close(self) -> None:
        """End every child at once, whoever waits for it."""
        self.closed = True
        for channel in list(self.channels):
            channel.kill()
        self.threads.shutdown(wait=False)  # not cancelled: waiting jobs wake their threads

    def _build(self, problem: Problem, candidate: Candidate) -> Built | Failed:
        if self.closed:
            raise Stopped
        channel = self._channel()
        try:
            return channel.request(Build(problem, candidate, self.gpu), self.timeout)
        except ChildTimeout as error:
            return self._lost(channel, Failed("timeout", f"compiling: {error}"))
        except ChildDied as error:
            return self._lost(channel, Failed("crashed", f"the compiler: {error}"))

    def _channel(self) -> Channel:
        """This thread's child process."""
        channel: Channel | None = getattr(self.local, "channel", None)
        if channel is None:
            channel = Channel("kernelcat.tune.compiler", self.spec)
            self.local.channel = channel
            self.channels.add(channel)
            if self.closed:
                channel.kill()
        return channel

    def _lost(self, channel: Channel, outcome: Failed) -> Failed:
        if self.closed:
            raise Stopped
        channel.kill()
        self.channels.discard(channel)
        self.local.channel = None
        return outcome
