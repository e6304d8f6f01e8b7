"""Readers of an engine's outputs, one for each request that somebody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kernelcat.moe.engine.engine import EngineError, RequestOutput


class Reader:
    """Takes the outputs of one request, of which those that wait are merged into one.

    Attributes
    ----------
    has_ended : whether the last output has been taken
    """

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self.has_ended = False

    def put(self, output: RequestOutput) -> None:
        """Adds to what waits; nothing follows an error."""
        if self._error is not None:
            return
        if self._output is None:
            self._output = output
        else:
            self._output.extend(output)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Lets `get` raise ``error``, behind the output that waits."""
        if self._error is None:
            self._error = error
        self._has_news.set()

    async def get(self) -> RequestOutput:
        """Waits for output; raises what the reader was told by `fail`."""
        await self._has_news.wait()
        output, self._output = self._output, None
        if self._error is None:
            self._has_news.clear()
        elif output is None:
            raise self._error
        assert output is not None
        self.has_ended = output.finish_reason is not None
        return output

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.has_ended:
            raise StopAsyncIteration
        return await self.get()


class Readers:
    """The readers of an engine, by request. Only the event loop's thread uses them."""

    def __init__(self) -> None:
        self._readers: dict[str, Reader] = {}

    @property
    def are_waiting(self) -> bool:
        """Whether one of them has not taken its last output."""
        return any(not reader.has_ended for reader in self._readers.values())

    @contextmanager
    def reading(
        self, request_id: str, cancel: Callable[[str], object] = lambda request_id: None
    ) -> Iterator[Reader]:
        """A request's reader; calls ``cancel`` if the context ends before the last output."""
        reader = self._readers[request_id] = Reader()
        try:
            yield reader
        finally:
            if self._readers.get(request_id) is reader:  # a request may have the id of an ended one
                del self._readers[request_id]
            if not reader.has_ended:
                cancel(request_id)

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        """Hands outputs to those who wait for them, if they still do."""
        for output in outputs:
            if reader := self._readers.get(output.request_id):
                reader.put(output)

    def fail(self, request_id: str, error: Exception) -> None:
        """Lets a reader raise ``error``, if there still is one."""
        if reader := self._readers.get(request_id):
            reader.fail(error)

    def fail_all(self, reason: str) -> None:
        """Lets all readers raise an ``EngineError``."""
        for reader in self._readers.values():
            reader.fail(EngineError(reason))
