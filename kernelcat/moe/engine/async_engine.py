"""An engine on a thread of its own, for programs that use asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from kernelcat.moe.engine.engine import Engine, EngineError, RequestOutput
from kernelcat.moe.engine.readers import Readers
from kernelcat.moe.engine.sampling import TokenLogprob
from kernelcat.moe.engine.served_engine import Ask, ServedEngine

__all__ = ["AsyncEngine", "EngineError", "RequestOutput", "TokenLogprob"]


class AsyncEngine(ServedEngine):
    """Runs `Engine.step` on one thread while there is work.

    Parameters
    ----------
    engine : nobody else calls its `step` or `close`
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.limits = engine, engine.limits
        self._readers = Readers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._has_news = threading.Condition()
        self._is_stopping = False

    @property
    def is_healthy(self) -> bool:
        is_running = self._thread is not None and self._thread.is_alive()
        return is_running and self._engine.is_healthy

    def metrics(self) -> dict[str, Any]:
        return asdict(self._engine.statistics())

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_stopping = self._is_refusing = False
        self._thread = threading.Thread(target=self._run, name="kernelcat-engine", daemon=True)
        self._thread.start()

    async def stop(self, grace: float = 0.0) -> None:
        """As `ServedEngine.stop`; the engine is closed then."""
        await self._drain(grace, lambda: self._readers.are_waiting)
        if self._thread is None:
            return
        with self._has_news:
            self._is_stopping = True
            self._has_news.notify()
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    async def outputs(self, ask: Ask) -> AsyncGenerator[RequestOutput, None]:
        if self._is_refusing or self._thread is None:
            raise EngineError("the engine does not run")
        # outputs come through the event loop, so none can be there before the reader is
        request = self._engine.submit(
            ask.prompt,
            ask.parameters,
            request_id=ask.request_id,
            needs_text=ask.needs_text,
            constraint=ask.constraint,
            salt=ask.salt,
        )
        with self._readers.reading(request.id, self._engine.cancel) as reader:
            with self._has_news:
                self._has_news.notify()
            async for output in reader:
                yield output

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs steps until `stop`."""
        while True:
            with self._has_news:
                while not self._is_stopping and not self._engine.has_work:
                    self._has_news.wait()
                if self._is_stopping:
                    break
            try:
                self._deliver(self._engine.step())
            except Exception as error:  # an error in the engine itself: nothing can be trusted
                self._deliver(self._engine.abort(error))
                raise
        self._deliver(self._engine.close())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hands outputs to the event loop, all of a step at once."""
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._readers.put, outputs)
