"""An engine on a thread of its own, for programs that use asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from kernelcat.moe.engine.constraint import Constraint
from kernelcat.moe.engine.engine import Engine, EngineError, RequestOutput, TokenLogprob
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters

__all__ = ["AsyncEngine", "EngineError", "RequestOutput", "TokenLogprob"]


class AsyncEngine:
    """Runs `Engine.step` on one thread while there is work.

    Parameters
    ----------
    engine : nobody else calls its `step`
    """

    def __init__(self, engine: Engine) -> None:
        raise NotImplementedError

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        raise NotImplementedError

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs and steps can run."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """The engine's statistics by name; names that end in ``_total`` are counters."""
        raise NotImplementedError

    async def start(self) -> None:
        """Starts the thread. Call it in the event loop that calls `generate`."""
        raise NotImplementedError

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, waits up to ``grace`` seconds for those that run, ends the others.

        A request that is ended gets a last output with finish reason CANCELLED. Then the thread
        ends.
        """
        raise NotImplementedError

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

        Outputs that wait while the consumer is busy are merged into one. Closing the generator, or
        cancelling the task that reads it, cancels the request.

        Raises
        ------
        QueueFull, InvalidArgument, EngineError
            As `Engine.submit`, at the first iteration.
        """
        raise NotImplementedError
        yield RequestOutput("")
