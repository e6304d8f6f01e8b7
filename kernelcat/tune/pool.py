"""The pool of compiling processes that works ahead of measuring.

A compiler that crashes or never ends costs one candidate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from kernelcat.gpu import Gpu
from kernelcat.spec import Problem
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout

MAX_PROCESSES = 16


@dataclass(frozen=True)
class Built:
    """How compiling went: ``passed`` with every artifact's metadata, or why not."""

    status: str
    detail: str = ""
    steps: tuple[dict[str, Any], ...] = ()


class CompilePool:
    """Compiles candidates in ``processes`` child processes; each has its own timeout."""

    def __init__(self, spec: str, gpu: Gpu, processes: int | None = None, timeout: float = 120):
        self.spec, self.gpu, self.timeout = spec, gpu, timeout
        self.threads = ThreadPoolExecutor(processes or min(os.cpu_count() or 1, MAX_PROCESSES))
        self.local = threading.local()
        self.channels: set[Channel] = set()
        self.closed = False

    def build(
        self, problem: Problem, candidates: Iterable[Candidate]
    ) -> Iterator[tuple[Candidate, Built]]:
        """Each candidate with its outcome, in the order in which they are done."""
        jobs = {self.threads.submit(self._build, problem, c): c for c in candidates}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        finally:
            for job in jobs:
                job.cancel()

    def close(self) -> None:
        """End every child at once."""
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for channel in list(self.channels):
            channel.kill()

    def _build(self, problem: Problem, candidate: Candidate) -> Built:
        channel = self._channel()
        try:
            reply = channel.request("build", self.timeout, entry=problem.entry,
                                    axes=problem.values, lane=candidate.key,
                                    gpu=asdict(self.gpu))  # fmt: skip
        except ChildTimeout as error:
            return self._lost(channel, Built("timeout", f"compiling: {error}"))
        except ChildDied as error:
            return self._lost(channel, Built("crashed", f"the compiler: {error}"))
        return Built(reply["status"], reply.get("detail", ""), tuple(reply.get("steps", ())))

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

    def _lost(self, channel: Channel, outcome: Built) -> Built:
        channel.kill()
        self.channels.discard(channel)
        self.local.channel = None
        return outcome
