"""An engine in a process of its own, with the interface of `AsyncEngine`.

HTTP and the engine's scheduler are both Python. In one process they take turns, and a step waits
for the events of the step before. In two processes a server that is behind merges outputs, and the
engine does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from kernelcat.moe.engine.engine import EngineError, RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.statistics import Statistics
from kernelcat.moe.parallel.expert_member import ExpertMember
from kernelcat.moe.serve.engine_messages import (
    Cancel,
    FromEngine,
    Open,
    Outputs,
    ReadStatistics,
    Refused,
    Stop,
    Submit,
    ToEngine,
    Wake,
)
from kernelcat.moe.serve.engine_pipe import EnginePipe
from kernelcat.moe.serve.grammars import Grammar
from kernelcat.moe.source import ModelSource

STATISTICS_TIMEOUT = 10.0


class EngineProcess:
    """A process with an engine. It ends with the thread that makes this object.

    Parameters
    ----------
    source : the model
    settings : the engine's
    member : the rank whose engine it is, if several ranks divide the experts. Then the caller
        starts the processes of all ranks, and then calls `wait_until_ready` of each

    Attributes
    ----------
    limits : the engine's limits
    reason : why the process has ended, as far as is known
    on_end : called by a thread when the engine cannot run any more, and when the process has ended

    Raises
    ------
    KernelcatError
        What opening the model and the engine raise.
    EngineError
        The process has ended without saying why.
    """

    limits: Limits

    def __init__(
        self, source: ModelSource, settings: EngineSettings, member: ExpertMember | None = None
    ) -> None:
        self._begin(Open(source, settings, member))
        if member is None:
            self.wait_until_ready()
        else:
            self.reason = f"the process of rank {member.rank} has ended"

    def _begin(self, message: Open, env: Mapping[str, str] | None = None) -> None:
        """Starts the process, with the environment ``env`` (None for this one's)."""
        self._pipe = EnginePipe(message, env)
        self._asking = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: threading.Thread | None = None
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._statistics: list[Future[Statistics]] = []
        self._ids = itertools.count()
        self._is_refusing = False
        self._has_ended = False
        self.reason = "the engine has stopped"
        self.on_end: Callable[[], object] = lambda: None

    def wait_until_ready(self) -> None:
        """Waits until the engine can run; see the class for errors."""
        self.limits = self._pipe.wait_until_ready()

    @property
    def process_id(self) -> int:
        """The id of the process's guard, with which the process ends."""
        return self._pipe.process_id

    @property
    def is_healthy(self) -> bool:
        """Whether the process runs and steps can run."""
        return self._reader is not None and not self._has_ended

    def metrics(self) -> dict[str, Any]:
        """The engine's statistics by name; waits for the process, so call it in a thread."""
        return asdict(self.statistics())

    def statistics(self) -> Statistics:
        """The engine's statistics; waits for the process.

        Raises
        ------
        EngineError
            The process has ended.
        """
        answer: Future[Statistics] = Future()
        with self._asking:
            if self._has_ended:
                raise EngineError(self.reason)
            self._statistics.append(answer)
            self._pipe.send(ReadStatistics())
        return answer.result(STATISTICS_TIMEOUT)

    def wake(self) -> None:
        """Tells the rank that another one has got a request."""
        self._send(Wake())

    def kill(self, reason: str = "the engine has stopped") -> None:
        """Ends the process at once; its requests end with an error that says ``reason``."""
        if not self._has_ended:
            self.reason = reason
            self._pipe.kill()

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
        await asyncio.to_thread(self._pipe.join)

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
        if not self._has_ended:
            self._pipe.send(message)

    # ---- the thread -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Takes messages until the process ends."""
        with contextlib.suppress(EOFError):
            while True:
                message = self._pipe.receive()
                if isinstance(message, Statistics):
                    self._statistics.pop(0).set_result(message)
                elif isinstance(message, Refused) and not message.request_id:
                    self.reason = str(message.error)
                    self.on_end()
                else:
                    self._call(self._deliver, message)
        with self._asking:
            self._has_ended = True
            for answer in self._statistics:
                answer.set_exception(EngineError(self.reason))
        self._call(self._end_all)
        self.on_end()

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
            queue.put_nowait(EngineError(self.reason))


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
