"""An engine of two processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcat.errors import KernelcatError, RankFailed
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.disaggregate.side import Side
from kernelcat.moe.disaggregate.watch import watch
from kernelcat.moe.engine.engine import EngineError, RequestOutput
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.served_engine import Ask, ServedEngine
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.serve.engine_messages import Arrived, FromEngine, Open, Submit, Wanted
from kernelcat.moe.serve.engine_process import EngineProcess
from kernelcat.moe.source import ModelSource


class SideProcess(EngineProcess):
    """The process of one of the two engines; `wait_until_ready` follows."""

    def __init__(self, source: ModelSource, settings: EngineSettings, side: Side) -> None:
        self._begin(Open(source, settings, side=side), side.environment(source.device))
        self.name = f"{side.name} engine"


class PrefillProcess(SideProcess):
    """Computes prompts."""

    async def first(self, message: Submit) -> RequestOutput:
        """The last output of a request of one token: no page of it is written any more.

        `cancel` lets it come soon, without a token.

        Raises
        ------
        KernelcatError
            The engine refuses the request, or has ended.
        """
        if not self.is_healthy:
            raise EngineError("the engine has stopped")
        with self._readers.reading(message.request_id) as reader:
            self._send(message)
            return await reader.get()


class DecodeProcess(SideProcess):
    """Takes all requests, and asks for prompts by ``on_wanted``, which the event loop calls.

    Attributes
    ----------
    submitted : requests that somebody waits for, by id
    num_queued : tokens of prompts that the other engine has to compute
    """

    def __init__(self, source: ModelSource, settings: EngineSettings, side: Side) -> None:
        super().__init__(source, settings, side)
        self.on_wanted: Callable[[Wanted], None] | None = None
        self.submitted: dict[str, Submit] = {}
        self.num_queued = 0

    def _submit(self, message: Submit) -> None:
        self.submitted[message.request_id] = message
        self._send(replace(message, num_queued=self.num_queued))

    def _deliver(self, message: FromEngine) -> None:
        if not isinstance(message, Wanted):
            return super()._deliver(message)
        assert self.on_wanted is not None
        return self.on_wanted(message)

    def arrived(self, output: RequestOutput) -> None:
        """The other engine is done with a request, and ``output`` is what it has chosen."""
        self._send(Arrived(output))


class Disaggregated(ServedEngine):
    """Two processes with an engine each: one computes prompts, the other one writes.

    They end with the thread that makes this object. Parameters, attributes and errors are those of
    `EngineProcess`; ``router`` chooses where prompts are computed. On GPUs the prefill engine has
    the first visible one, and the decode engine the second. Both have as many pages.

    A side that ends or hangs ends the requests that need it, with an error, and this engine is not
    healthy any more.
    """

    def __init__(
        self, source: ModelSource, settings: EngineSettings, router: Router | None = None
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "engines")
            self.prefill = PrefillProcess(source, settings, Side(False, path))
            self.decode = DecodeProcess(source, settings, Side(True, path, router or Router()))
            self._wait_until_ready()
        self.decode.on_wanted = self._compute_wanted
        self.limits = self.decode.limits
        self._ids = itertools.count()
        self._computing: dict[str, int] = {}
        self._num_computed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def _wait_until_ready(self) -> None:
        """Waits for both; the error of the one that failed is not that the other heard of it."""
        errors: list[KernelcatError] = []
        for side in (self.prefill, self.decode):
            try:
                side.wait_until_ready()
            except KernelcatError as error:
                errors.append(error)
        if errors:
            for side in (self.prefill, self.decode):
                side.kill()
            raise next((e for e in errors if not isinstance(e, RankFailed)), errors[0])

    @property
    def is_healthy(self) -> bool:
        return self.prefill.is_healthy and self.decode.is_healthy

    def metrics(self) -> dict[str, float]:
        """The decode engine's statistics, those of the prefill engine as ``prefill_...``, and
        ``fetched_requests_total``: requests whose prompts the prefill engine has computed.
        """
        prefill = {f"prefill_{name}": value for name, value in self.prefill.metrics().items()}
        return {
            **self.decode.metrics(),
            **prefill,
            "fetched_requests_total": self._num_computed,
        }

    async def start(self) -> None:
        for side in (self.prefill, self.decode):
            await side.start()
            self._keep(watch(side))

    async def stop(self, grace: float = 0.0) -> None:
        await self.decode.stop(grace)
        await self.prefill.stop()
        for task in self._tasks:
            task.cancel()

    async def outputs(self, ask: Ask) -> AsyncGenerator[RequestOutput, None]:
        if not self.prefill.is_healthy:
            raise EngineError("the engine does not run")
        name = f"request-{next(self._ids)}" if ask.request_id is None else ask.request_id
        outputs = self.decode.outputs(replace(ask, request_id=name))
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self.decode.submitted.pop(name, None)
            if name in self._computing:
                self.prefill.cancel(name)

    # ---- prompts that the decode engine wants ---------------------------------------------------

    def _compute_wanted(self, wanted: Wanted) -> None:
        message = self.decode.submitted.get(wanted.request_id)
        if message is None:  # nobody waits for it any more
            output = RequestOutput(wanted.request_id, finish_reason=FinishReason.CANCELLED)
            self.decode.arrived(output)
        else:
            self._keep(self._compute(message, wanted))

    async def _compute(self, message: Submit, wanted: Wanted) -> None:
        """Lets the prefill engine compute a prompt, and tells the decode engine."""
        name = message.request_id
        parameters = replace(
            message.parameters, max_tokens=1, stop=(), stop_tokens=frozenset[int]()
        )
        self._count(name, len(message.prompt))
        try:
            output = await self.prefill.first(
                replace(
                    message, parameters=parameters, needs_text=False,
                    destination=wanted.destination,
                )
            )  # fmt: skip
        except Exception as error:  # whatever it is, the decode engine waits for an answer
            text = f"{self.prefill.name}: {error}"
            output = RequestOutput(name, finish_reason=FinishReason.ERROR, error=text)
        self._count(name, 0)
        self._num_computed += bool(output.tokens)
        self.decode.arrived(output)

    def _count(self, name: str, num_tokens: int) -> None:
        """The prefill engine has ``num_tokens`` tokens of a request to compute; 0 for no more."""
        self._computing[name] = num_tokens
        if not num_tokens:
            del self._computing[name]
        self.decode.num_queued = sum(self._computing.values())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
