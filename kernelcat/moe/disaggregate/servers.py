"""The processes of the two engines, behind pipes: `EngineServer` with what disaggregation adds."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from kernelcat.moe.disaggregate.decode_engine import DecodeEngine
from kernelcat.moe.disaggregate.side import Side
from kernelcat.moe.engine.engine import Engine, RequestOutput
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.serve.engine_child import EngineServer
from kernelcat.moe.serve.engine_messages import Arrived, Cancel, Submit, ToEngine, Wanted
from kernelcat.moe.source import ModelSource
from kernelcat.moe.tokenizer import Tokenizer

STALLED_S = 0.01
"""Seconds after which requests that no step could take are tried again, at the latest."""


def open_side(
    side: Side,
    source: ModelSource,
    settings: EngineSettings,
    tokenizer: Tokenizer,
    pipe: Connection,
) -> EngineServer:
    """The engine of a side behind ``pipe``, linked to the other one."""
    link = side.link(source.device)  # before the weights: both processes have just begun
    model = source.open()
    if not side.is_decode:
        settings = replace(settings, speculation=None, has_graphs=False)  # it does not decode
        return PrefillServer(Engine(model, settings, tokenizer.decode, link), tokenizer, pipe)
    engine = DecodeEngine(model, settings, tokenizer.decode, link)
    engine.use_router(side.router)
    return DecodeServer(engine, tokenizer, pipe)


class PrefillServer(EngineServer):
    """Computes prompts, and sends their pages to the decode engine.

    The last output of a request says that no page of it is written any more. A request that is
    cancelled or fails may have a step in flight, so its output follows after the next step, which
    waits for the one before.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cancelled: deque[str] = deque()
        self._held: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._cancelled or self._held) or super().has_work

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Cancel):
            self._cancelled.append(message.request_id)
            self._notify()
        else:
            super().take(message)

    def step(self) -> None:
        ended: list[RequestOutput] = []
        while self._cancelled:
            name = self._cancelled.popleft()
            if self._engine.cancel(name):
                ended.append(RequestOutput(name, finish_reason=FinishReason.CANCELLED))
        outputs = self._engine.step()
        ended += [output for output in outputs if not output.tokens]
        self._send_outputs(self._held + [output for output in outputs if output.tokens])
        self._held = ended


class DecodeServer(EngineServer):
    """Writes; asks for prompts, and goes on with requests whose prompts have come."""

    _engine: DecodeEngine

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrived: deque[RequestOutput] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._arrived) or super().has_work

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Arrived):
            self._arrived.append(message.output)
            return self._notify()
        if isinstance(message, Submit):
            self._engine.note_queue(message.num_queued)
        super().take(message)
        self._ask()

    def step(self) -> None:
        while self._arrived:  # in this thread: the first token goes out before the second
            self._send_outputs(self._engine.arrive(self._arrived.popleft()))
        self._send_outputs(self._engine.step())
        self._ask()
        if self._engine.is_stalled:
            with self._has_news:
                if not self._arrived and not self._is_stopping:
                    self._has_news.wait(STALLED_S)

    def _ask(self) -> None:
        """Asks for the prompts of requests that have pages now."""
        for name, destination in self._engine.take_wanted():
            self._send(Wanted(name, destination))
