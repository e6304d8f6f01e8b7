"""Engines of several ranks as one, for the server.

A router hands each request to one rank. All others hear of it, because ranks take every step
together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

from kernelcat.moe.engine.engine import EngineError, RequestOutput
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.served_engine import Ask, ServedEngine
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.parallel import expert_processes
from kernelcat.moe.parallel.expert_statistics import ExpertStatistics
from kernelcat.moe.parallel.router import Router
from kernelcat.moe.serve.engine_process import EngineProcess
from kernelcat.moe.source import ModelSource


class ExpertEngines(ServedEngine):
    """A process for each rank.

    When a rank ends, the processes of all others end too, and all requests get an error. They end
    with the thread that makes this object.

    Parameters
    ----------
    source : the model
    settings : of each rank's engine
    ranks : processes among which experts are divided
    rebalance_every : steps after which experts may change places; 0 for never

    Attributes
    ----------
    limits : of each rank's engine

    Raises
    ------
    KernelcatError
        What opening the model and an engine raise.
    """

    def __init__(
        self, source: ModelSource, settings: EngineSettings, ranks: int, rebalance_every: int = 0
    ) -> None:
        self._folder, self._engines = expert_processes.start(
            source, ranks, rebalance_every, partial(EngineProcess, source, settings)
        )
        try:
            for engine in self._engines:
                engine.wait_until_ready()
        except BaseException:
            for engine in self._engines:
                engine.kill("another rank has failed")
            raise
        for rank, engine in enumerate(self._engines):
            engine.on_end = partial(self._end, rank)
        self.limits = self._engines[0].limits
        self._router = Router(ranks, settings.page_size)

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes' guards, with which the processes end."""
        return [engine.process_id for engine in self._engines]

    @property
    def is_healthy(self) -> bool:
        return all(engine.is_healthy for engine in self._engines)

    def metrics(self) -> dict[str, Any]:
        """The statistics of all ranks together."""
        return asdict(ExpertStatistics.together([e.statistics() for e in self._engines]))

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def stop(self, grace: float = 0.0) -> None:
        await self._drain(grace, lambda: any(self._router.num_running))
        await asyncio.gather(*(engine.stop() for engine in self._engines))
        self._folder.cleanup()

    async def outputs(self, ask: Ask) -> AsyncGenerator[RequestOutput, None]:
        if self._is_refusing or not self.is_healthy:
            raise EngineError(self._reason())
        rank = self._router.start(ask.prompt, ask.salt)
        for other, engine in enumerate(self._engines):
            if other != rank:
                engine.wake()
        outputs = self._engines[rank].outputs(ask)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if self._is_refusing and output.finish_reason is FinishReason.ERROR:
                        # a rank that stops misses those that have stopped before it
                        output.finish_reason = FinishReason.CANCELLED
                    yield output
        finally:
            self._router.end(rank)

    def _reason(self) -> str:
        """Why no request can run."""
        ended = [engine.reason for engine in self._engines if not engine.is_healthy]
        return ended[0] if ended else "the engine does not run"

    def _end(self, rank: int) -> None:
        """Ends all ranks, because one cannot go on. A rank that hangs would end no request."""
        if self._is_refusing:
            return
        for engine in self._engines:
            engine.kill(self._engines[rank].reason)
