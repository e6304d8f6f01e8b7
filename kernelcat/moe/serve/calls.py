"""A call of the API while it runs: its requests to the engine, and how it ends.

A call has one queue. The engine's output, an error, the client's disconnect and the server's end
all arrive there, so whoever reads the queue sees everything in one order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive

from kernelcat.moe.engine.engine import RequestOutput
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.served_engine import ServedEngine
from kernelcat.moe.serve import errors
from kernelcat.moe.serve.grammars import Grammar
from kernelcat.moe.serve.metrics import Metrics


class ClientGone(Exception):
    """The client has closed its connection, so nobody reads an answer."""


@dataclass
class Job:
    """What one choice asks of the engine, and what has come of it.

    Attributes
    ----------
    prompt : token ids
    parameters : how tokens are chosen
    needs_text : whether the engine turns tokens into text
    constraint : which tokens may come next; None for all
    num_tokens : tokens that were written
    num_cached : tokens of the prompt that were in the prefix cache
    first_at, last_at : seconds after the call's arrival
    """

    prompt: Sequence[int]
    parameters: SamplingParameters
    needs_text: bool = True
    constraint: Grammar | None = None

    num_tokens: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)
    first_at: float = field(init=False, default=0.0)
    last_at: float = field(init=False, default=0.0)


@dataclass(slots=True)
class Piece:
    """Output of choice number ``index``."""

    index: int
    output: RequestOutput


class Call:
    """The choices of one call. What still runs when its context ends is cancelled.

    Parameters
    ----------
    engine : runs the jobs
    jobs : a choice each
    receive : ASGI's; the body has been read, so the next message is the disconnect
    metrics : get the times of choices that are answered
    """

    def __init__(
        self, engine: ServedEngine, jobs: Sequence[Job], receive: Receive, metrics: Metrics
    ) -> None:
        self.jobs = jobs
        self._engine, self._receive, self._metrics = engine, receive, metrics
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._arrived_at = time.monotonic()

    def start(self) -> None:
        """Submits all jobs; errors arrive with the pieces."""
        for index, job in enumerate(self.jobs):
            self._pumps[index] = asyncio.create_task(self._pump(index, job))
        self._watch = asyncio.create_task(self._wait_for_disconnect())

    async def _pump(self, index: int, job: Job) -> None:
        try:
            outputs = self._engine.generate(
                job.prompt,
                job.parameters,
                needs_text=job.needs_text,
                constraint=job.constraint,
            )
            async for output in outputs:
                self._queue.put_nowait(Piece(index, output))
        except Exception as error:
            self._queue.put_nowait(error)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(ClientGone())

    def fail(self, error: Exception) -> None:
        """Ends the call with ``error``, after the pieces that are there."""
        self._queue.put_nowait(error)

    def end_choice(self, index: int) -> None:
        """Cancels a choice whose answer is complete; no further piece of the choice follows."""
        task = self._pumps.pop(index, None)
        if task is not None:
            task.cancel()
            self._account(self.jobs[index])

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces until every choice has ended.

        Raises
        ------
        ClientGone
            The client has closed its connection.
        ApiError, InvalidArgument, QueueFull
            The request is refused, has failed, or the server ends.
        """
        while self._pumps:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item.index not in self._pumps:  # was cancelled after the piece was made
                continue
            job, output = self.jobs[item.index], item.output
            self._time(job, output)
            if output.finish_reason is FinishReason.ERROR:
                raise errors.failed(f"the engine failed: {output.error or 'unknown error'}")
            if output.finish_reason is FinishReason.CANCELLED:
                raise errors.shutting_down()
            if output.finish_reason is not None:
                del self._pumps[item.index]
                self._account(job)
            yield item

    def _time(self, job: Job, output: RequestOutput) -> None:
        job.num_tokens += len(output.tokens)
        job.num_cached = output.num_cached
        job.last_at = time.monotonic() - self._arrived_at
        job.first_at = job.first_at or job.last_at

    def _account(self, job: Job) -> None:
        """Adds a choice that was answered to the metrics."""
        self._metrics.ttft.observe(job.first_at)
        self._metrics.latency.observe(job.last_at)
        if job.num_tokens > 1:
            self._metrics.tpot.observe((job.last_at - job.first_at) / (job.num_tokens - 1))

    def close(self) -> None:
        """Cancels what still runs."""
        for task in self._pumps.values():
            task.cancel()
        self._pumps = {}
        if self._watch is not None:
            self._watch.cancel()


class Calls:
    """All calls that run."""

    def __init__(self, engine: ServedEngine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._running: set[Call] = set()

    def start(self, jobs: Sequence[Job], receive: Receive) -> Call:
        """Starts a call; whoever starts it must `end` it."""
        call = Call(self._engine, jobs, receive, self._metrics)
        self._running.add(call)
        call.start()
        return call

    def end(self, call: Call) -> None:
        """Cancels what still runs of a call."""
        call.close()
        self._running.discard(call)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Ends all calls with an error."""
        for call in self._running:
            call.fail(make_error())
