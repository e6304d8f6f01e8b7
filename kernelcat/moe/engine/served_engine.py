"""What a server needs of an engine.

The engine runs in this process, in a process of its own, in one for each rank, or in two sides.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelcat.moe.engine.constraint import Constraint
from kernelcat.moe.engine.engine import RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters


@dataclass(frozen=True, slots=True)
class Ask:
    """What somebody asks of an engine: the arguments of `ServedEngine.generate`."""

    prompt: Sequence[int]
    parameters: SamplingParameters
    request_id: str | None
    needs_text: bool
    constraint: Constraint | None
    salt: str


class ServedEngine(ABC):
    """Writes for many readers at once, in one event loop.

    Attributes
    ----------
    limits : of requests
    """

    limits: Limits
    _is_refusing = False

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether the engine runs and steps can run."""

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """The engine's statistics by name; names that end in ``_total`` are counters.

        It may wait for a process, so call it in a thread. Raises ``EngineError`` if the process has
        ended.
        """

    @abstractmethod
    async def start(self) -> None:
        """Begins to write. Call it in the event loop that calls `generate`."""

    @abstractmethod
    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, waits up to ``grace`` seconds for those that run, ends the others.

        A request that is ended gets a last output with finish reason CANCELLED. Then the engine
        ends.
        """

    def generate(
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
        cancelling the task that reads it, cancels the request. An engine in another process takes
        as a constraint only a `Grammar` at its beginning.

        Raises
        ------
        QueueFull, InvalidArgument, EngineError
            As `Engine.submit`, at the first iteration.
        """
        parameters = parameters or SamplingParameters()
        return self.outputs(Ask(prompt, parameters, request_id, needs_text, constraint, salt))

    @abstractmethod
    def outputs(self, ask: Ask) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`."""

    async def _drain(self, grace: float, is_busy: Callable[[], bool]) -> None:
        """Refuses new requests, and waits up to ``grace`` seconds for those that run."""
        self._is_refusing = True
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        while is_busy() and loop.time() < end and self.is_healthy:
            await asyncio.sleep(0.01)
