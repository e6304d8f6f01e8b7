"""What long prompts cost requests that write: inter-token latency without and with them.

Requests that write begin together. While they write the first half of their tokens nothing else
happens; meanwhile the second half long prompts arrive at a steady rate, each for one token. Times
are those at which this process gets outputs of an engine in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.bench import prompts
from kernelcat.moe.engine.limits import QueueFull
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.served_engine import ServedEngine
from kernelcat.moe.serving_metrics import Percentiles

POLL_S = 0.01
"""Seconds between two looks at how far requests have come."""


@dataclass(frozen=True)
class Traffic:
    """Who writes, and what arrives.

    Attributes
    ----------
    batch : requests that write
    context : tokens of their prompts
    num_tokens : tokens that each of them writes
    prompt_tokens : tokens of each prompt that arrives
    rate : prompts a second

    Raises
    ------
    InvalidArgument
        A number is too small.
    """

    batch: int
    context: int
    num_tokens: int
    prompt_tokens: int
    rate: float

    def __post_init__(self) -> None:
        if min(self.batch, self.context, self.prompt_tokens) < 1 or self.num_tokens < 8:
            raise InvalidArgument(f"{self}: numbers must be positive, num_tokens at least 8")
        if not 0 < self.rate < float("inf"):
            raise InvalidArgument(f"rate={self.rate} must be a number of prompts a second")


@dataclass(frozen=True)
class Interference:
    """Inter-token latency of the requests that write.

    Attributes
    ----------
    engine : ``colocated`` or ``disaggregated``
    idle_ms, loaded_ms : before and while prompts arrive
    prompt_ms : from the arrival of a prompt to its token; None if none was answered
    """

    engine: str
    traffic: Traffic
    idle_ms: Percentiles
    loaded_ms: Percentiles
    prompt_ms: Percentiles | None

    @property
    def ratio(self) -> float:
        """The 99th percentile with prompts, as a multiple of the one without."""
        return self.loaded_ms.p99 / self.idle_ms.p99


@dataclass
class _Writer:
    """A request that writes: the times of its outputs, and how many tokens it has."""

    times: list[float] = field(default_factory=list)
    num_tokens: int = 0


async def measure(name: str, engine: ServedEngine, traffic: Traffic) -> Interference:
    """Starts ``engine``, measures, and stops it.

    Raises
    ------
    KernelcatError
        A request has failed.
    """
    await engine.start()
    try:
        return await _measure(name, engine, traffic)
    finally:
        await engine.stop()


async def _measure(name: str, engine: ServedEngine, traffic: Traffic) -> Interference:
    vocab_size, waits = engine.limits.vocab_size, list[float]()
    texts = prompts(traffic.batch, traffic.context, vocab_size, seed=0)
    writers = [_Writer() for _ in texts]
    writing = [
        asyncio.create_task(_write(engine, text, traffic.num_tokens, writer))
        for text, writer in zip(texts, writers, strict=True)
    ]
    tasks = [*writing]
    try:
        begin = await _until(writing, tasks, writers, 1)
        middle = await _until(writing, tasks, writers, traffic.num_tokens // 2)
        tasks.append(asyncio.create_task(_arrive(engine, traffic, waits, tasks)))
        end = await _until(writing, tasks, writers, traffic.num_tokens)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    idle, loaded = (_gaps(writers, *span) for span in ((begin, middle), (middle, end)))
    if idle is None or loaded is None:
        raise InvalidArgument(f"{traffic.num_tokens} tokens are too few: take more")
    return Interference(name, traffic, idle, loaded, Percentiles.of(waits))


async def _write(engine: ServedEngine, text: list[int], num_tokens: int, writer: _Writer) -> None:
    """Runs a request, and notes its outputs in ``writer``."""
    parameters = SamplingParameters(temperature=0, max_tokens=num_tokens)
    async for output in engine.generate(text, parameters, needs_text=False):
        if output.error:
            raise KernelcatError(f"a request has failed: {output.error}")
        writer.times.append(time.perf_counter())
        writer.num_tokens += len(output.tokens)


async def _arrive(
    engine: ServedEngine,
    traffic: Traffic,
    waits: list[float],
    tasks: list[asyncio.Task[None]],
) -> None:
    """Prompts arrive until this is cancelled, a task each.

    ``waits`` gets the seconds to each one's token. An engine that is behind refuses prompts.
    """

    async def read(text: list[int]) -> None:
        start, writer = time.perf_counter(), _Writer()
        with contextlib.suppress(QueueFull):
            await _write(engine, text, 1, writer)
            waits.append(writer.times[0] - start)

    for number in count(1):
        [text] = prompts(1, traffic.prompt_tokens, engine.limits.vocab_size, seed=number)
        tasks.append(asyncio.create_task(read(text)))
        await asyncio.sleep(1 / traffic.rate)


async def _until(
    writing: Sequence[asyncio.Task[None]],
    tasks: Sequence[asyncio.Task[None]],
    writers: Sequence[_Writer],
    num_tokens: int,
) -> float:
    """The time at which every writer has ``num_tokens`` tokens, or one has ended before.

    Raises what one of ``tasks`` has raised.
    """
    while min(writer.num_tokens for writer in writers) < num_tokens:
        await asyncio.sleep(POLL_S)
        for task in tasks:
            if task.done():
                task.result()
        if any(task.done() for task in writing):
            break
    return time.perf_counter()


def _gaps(writers: Sequence[_Writer], begin: float, end: float) -> Percentiles | None:
    """The gaps between outputs from ``begin`` to ``end``."""
    pairs = (pair for writer in writers for pair in pairwise(writer.times))
    return Percentiles.of([b - a for a, b in pairs if begin <= a and b <= end])
