"""An engine in a process of its own, with the interface of `AsyncEngine`.

HTTP and the engine's scheduler are both Python. In one process they take turns, and a step waits
for the events of the step before. In two processes a server that is behind merges outputs, and the
engine does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from kernelcat.moe.engine.engine import EngineError, RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.statistics import Statistics
from kernelcat.moe.serve.engine_messages import (
    Cancel,
    FromEngine,
    Open,
    Outputs,
    ReadStatistics,
    Ready,
    Refused,
    Stop,
    Submit,
    ToEngine,
)
from kernelcat.moe.serve.grammars import Grammar
from kernelcat.moe.source import ModelSource
from kernelcat.runtime import children

END_TIMEOUT = 30.0
"""Seconds in which the process ends after its last request, or is killed."""
STATISTICS_TIMEOUT = 10.0


class EngineProcess:
    """A process with an engine. It ends with the thread that makes this object.

    Parameters
    ----------
    source : the model
    settings : the engine's

    Attributes
    ----------
    limits : the engine's limits

    Raises
    ------
    KernelcatError
        What opening the model and the engine raise.
    EngineError
        The process has ended without saying why.
    """

    limits: Limits

    def __init__(self, source: ModelSource, settings: EngineSettings) -> None:
        self._begin(Open(source, settings))
        self.wait_until_ready()

    def _begin(self, message: Open, env: Mapping[str, str] | None = None) -> None:
        """Starts the process, with the environment ``env`` (None for this one's)."""
        mine, other = socket.socketpair()
        with other:
            self._process = children.start(
                children.python("kernelcat.moe.serve.engine_child", str(other.fileno())),
                pass_fds=[other.fileno()],
                env=env,
            )
        self._pipe = Connection(mine.detach())
        self._sending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: threading.Thread | None = None
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._statistics: list[Future[Statistics]] = []
        self._ids = itertools.count()
        self._is_refusing = False
        self._has_ended = False
        self._send(message)

    def wait_until_ready(self) -> None:
        """Waits until the engine is open; raises what the constructor raises."""
        try:
            answer: FromEngine = self._pipe.recv()
        except EOFError:
            status = self._process.wait()
            raise EngineError(f"the engine's process ended with status {status}") from None
        if isinstance(answer, Refused):
            self._process.wait()
            raise answer.error
        assert isinstance(answer, Ready)
        self.limits = answer.limits

    @property
    def process_id(self) -> int:
        """The id of the process's guard, with which the process ends."""
        return self._process.pid

    @property
    def is_healthy(self) -> bool:
        """Whether the process runs and steps can run."""
        return self._reader is not None and not self._has_ended

    def metrics(self) -> dict[str, float]:
        """The engine's statistics by name; waits for the process, so call it in a thread.

        Raises
        ------
        EngineError
            The process has ended.
        """
        answer: Future[Statistics] = Future()
        with self._sending:
            if self._has_ended:
                raise EngineError("the engine has stopped")
            self._statistics.append(answer)
            with contextlib.suppress(OSError):  # the thread that reads ends the wait
                self._pipe.send(ReadStatistics())
        return asdict(answer.result(STATISTICS_TIMEOUT))

    async def start(self) -> None:
        """Begins to read outputs. Call it in the event loop that calls `generate`."""
        self._loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, name="kernelcat-outputs", daemon=True)
        self._reader.start()

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, waits up to ``grace`` seconds for those that run, ends the others.

        A request that is ended gets a last output with finish reason CANCELLED. Then the process
        ends.
        """
        self._is_refusing = True
        end = asyncio.get_running_loop().time() + grace
        while self._streams and asyncio.get_running_loop().time() < end and self.is_healthy:
            await asyncio.sleep(0.01)
        self._send(Stop())
        try:
            await asyncio.to_thread(self._process.wait, END_TIMEOUT)
        except subprocess.TimeoutExpired:
            children.stop(self._process)

    def kill(self) -> None:
        """Ends the process at once."""
        children.stop(self._process)

    async def generate(
        self,
        prompt: Sequence[int],
        parameters: SamplingParameters | None = None,
        *,
        request_id: str | None = None,
        needs_text: bool = True,
        constraint: Grammar | None = None,
        salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncEngine.generate`; a constraint must be a `Grammar` at its beginning."""
        if self._is_refusing or not self.is_healthy:
            raise EngineError("the engine does not run")
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        queue = self._streams[name] = asyncio.Queue[RequestOutput | Exception]()
        grammar = None if constraint is None else constraint.text
        parameters = parameters or SamplingParameters()
        self._submit(Submit(name, list(prompt), parameters, needs_text, grammar, salt))
        has_ended = False
        try:
            while not has_ended:
                output = _merged(queue, await queue.get())
                has_ended = output.finish_reason is not None
                yield output
        finally:
            del self._streams[name]
            if not has_ended:
                self._send(Cancel(name))

    def _submit(self, message: Submit) -> None:
        """Sends a request to the engine."""
        self._send(message)

    def _send(self, message: ToEngine) -> None:
        """Sends a message; nothing happens if the process has ended."""
        with self._sending:
            if not self._has_ended:
                with contextlib.suppress(OSError):  # the thread that reads will see the end, too
                    self._pipe.send(message)

    # ---- the thread -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Takes messages until the process ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: FromEngine = self._pipe.recv()
                if isinstance(message, Statistics):
                    self._statistics.pop(0).set_result(message)
                else:
                    self._call(self._deliver, message)
        with self._sending:
            self._has_ended = True
            for answer in self._statistics:
                answer.set_exception(EngineError("the engine has stopped"))
        self._call(self._end_all)

    def _call(self, function: Any, *args: Any) -> None:
        """Runs ``function`` in the event loop, while there is one."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, message: FromEngine) -> None:
        """Hands outputs to those who wait for them, if they still do."""
        if isinstance(message, Refused):
            if queue := self._streams.get(message.request_id):
                queue.put_nowait(message.error)
            return
        assert isinstance(message, Outputs)
        for output in message.outputs:
            if queue := self._streams.get(output.request_id):
                queue.put_nowait(output)

    def _end_all(self) -> None:
        for queue in self._streams.values():
            queue.put_nowait(EngineError("the engine has stopped"))


def _merged(
    queue: asyncio.Queue[RequestOutput | Exception], first: RequestOutput | Exception
) -> RequestOutput:
    """``first`` and all outputs that wait behind it, as one; raises an error that comes first."""
    if isinstance(first, Exception):
        raise first
    while not queue.empty() and first.finish_reason is None:
        item = queue.get_nowait()
        if isinstance(item, Exception):
            queue.put_nowait(item)
            break
        first.extend(item)
    return first
