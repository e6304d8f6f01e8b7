"""An engine in a process of its own.

HTTP and the engine's scheduler are both Python. In one process they take turns, and a step waits
for the events of the step before. In two processes a server that is behind merges outputs, and the
engine does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from kernelcat.moe.engine.engine import EngineError, RequestOutput
from kernelcat.moe.engine.readers import Readers
from kernelcat.moe.engine.served_engine import Ask, ServedEngine
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


class EngineProcess(ServedEngine):
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
        self._thread: threading.Thread | None = None
        self._readers = Readers()
        self._statistics: list[Future[Statistics]] = []
        self._ids = itertools.count()
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
        return self._thread is not None and not self._has_ended

    def metrics(self) -> dict[str, Any]:
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
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._read, name="kernelcat-outputs", daemon=True)
        self._thread.start()

    async def stop(self, grace: float = 0.0) -> None:
        await self._drain(grace, lambda: self._readers.are_waiting)
        self._send(Stop())
        await asyncio.to_thread(self._pipe.join)

    async def outputs(self, ask: Ask) -> AsyncGenerator[RequestOutput, None]:
        if self._is_refusing or not self.is_healthy:
            raise EngineError("the engine does not run")
        name = f"request-{next(self._ids)}" if ask.request_id is None else ask.request_id
        grammar = None
        if ask.constraint is not None:
            assert isinstance(ask.constraint, Grammar)
            grammar = ask.constraint.text
        message = Submit(name, list(ask.prompt), ask.parameters, ask.needs_text, grammar, ask.salt)
        with self._readers.reading(name, self.cancel) as reader:
            self._submit(message)
            async for output in reader:
                yield output

    def cancel(self, request_id: str) -> None:
        """Ends a request, if it runs."""
        self._send(Cancel(request_id))

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
        self._call(self._readers.fail_all, self.reason)
        self.on_end()

    def _call(self, function: Any, *args: Any) -> None:
        """Runs ``function`` in the event loop, while there is one."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, message: FromEngine) -> None:
        """Hands outputs to those who wait for them, if they still do."""
        if isinstance(message, Refused):
            return self._readers.fail(message.request_id, message.error)
        assert isinstance(message, Outputs)
        return self._readers.put(message.outputs)
