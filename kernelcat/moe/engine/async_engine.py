"""An engine on a thread of its own, for programs that use asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import Any

from kernelcat.moe.engine.constraint import Constraint
from kernelcat.moe.engine.engine import Engine, EngineError, RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.sampling import TokenLogprob

__all__ = ["AsyncEngine", "EngineError", "RequestOutput", "TokenLogprob"]


class _Stream:
    """Outputs of one request that its reader has not taken yet, merged into one.

    Only the event loop's thread uses a stream.
    """

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._has_output = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._output is None:
            self._output = output
        else:
            self._output.extend(output)
        self._has_output.set()

    async def get(self) -> RequestOutput:
        await self._has_output.wait()
        output, self._output = self._output, None
        self._has_output.clear()
        assert output is not None
        return output


class AsyncEngine:
    """Runs `Engine.step` on one thread while there is work.

    Parameters
    ----------
    engine : nobody else calls its `step` or `close`
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._has_news = threading.Condition()
        self._is_stopping = False
        self._is_refusing = False

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        return self._engine.limits

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs and steps can run."""
        is_running = self._thread is not None and self._thread.is_alive()
        return is_running and self._engine.is_healthy

    def metrics(self) -> dict[str, Any]:
        """The engine's statistics by name; names that end in ``_total`` are counters."""
        return asdict(self._engine.statistics())

    async def start(self) -> None:
        """Starts the thread. Call it in the event loop that calls `generate`."""
        self._loop = asyncio.get_running_loop()
        self._is_stopping = self._is_refusing = False
        self._thread = threading.Thread(target=self._run, name="kernelcat-engine", daemon=True)
        self._thread.start()

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, waits up to ``grace`` seconds for those that run, ends the others.

        A request that is ended gets a last output with finish reason CANCELLED. Then the thread
        ends, and the engine is closed.
        """
        self._is_refusing = True
        if self._thread is None or self._loop is None:
            return
        end = self._loop.time() + grace
        while self._streams and self._loop.time() < end and self.is_healthy:
            await asyncio.sleep(0.01)
        with self._has_news:
            self._is_stopping = True
            self._has_news.notify()
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    async def generate(
        self,
        prompt: Sequence[int],
        parameters: SamplingParameters | None = None,
        *,
        request_id: str | None = None,
        needs_text: bool = True,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs; the last one has a finish reason.

        Outputs that wait while the reader is busy are merged into one. Closing the generator, or
        cancelling the task that reads it, cancels the request.

        Raises
        ------
        QueueFull, InvalidArgument, EngineError
            As `Engine.submit`, at the first iteration.
        """
        if self._is_refusing or self._thread is None:
            raise EngineError("the engine does not run")
        # outputs come through the event loop, so none can be there before the stream is
        request = self._engine.submit(
            prompt,
            parameters,
            request_id=request_id,
            needs_text=needs_text,
            constraint=constraint,
            salt=salt,
        )
        stream = self._streams[request.id] = _Stream()
        with self._has_news:
            self._has_news.notify()
        try:
            while True:
                output = await stream.get()
                if output.finish_reason is not None:
                    del self._streams[request.id]
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(request.id, None) is not None:
                self._engine.cancel(request.id)

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
            self._loop.call_soon_threadsafe(self._put, outputs)

    def _put(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
