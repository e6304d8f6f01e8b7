"""The process of an engine: takes requests from a pipe, runs steps, and sends outputs back.

    python -m kernelcat.moe.serve.engine_child FD

The process ignores SIGINT and SIGTERM, which a terminal sends to the server too: the server decides
when requests have ended. It ends with the server, because the pipe then ends.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from multiprocessing.connection import Connection

from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.engine import Engine, EngineError, RequestOutput
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
    Wake,
)
from kernelcat.moe.serve.grammars import Grammars, grammars_of
from kernelcat.moe.tokenizer import Tokenizer


class EngineServer:
    """An engine behind a pipe. One thread runs steps, another one reads messages."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, pipe: Connection) -> None:
        self._engine, self._tokenizer, self._pipe = engine, tokenizer, pipe
        self._grammars: Grammars | None = None
        self._has_news = threading.Condition()
        self._is_stopping = False
        self._sending = threading.Lock()
        self.limits = engine.limits

    def run(self) -> None:
        """Runs steps until the server ends or says so, or the device is lost."""
        threading.Thread(target=self._read, name="kernelcat-messages", daemon=True).start()
        while self._engine.is_healthy:
            with self._has_news:
                while not self._is_stopping and not self.has_work:
                    self._has_news.wait()
                if self._is_stopping:
                    break
            try:
                self.step()
            except Exception as error:  # an error in the engine itself: nothing can be trusted
                self._send_outputs(self._engine.abort(error))
                raise
        if not self._engine.is_healthy:
            self._send(Refused("", EngineError(self._engine.failure)))
        self._send_outputs(self._engine.close())

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._engine.has_work

    def step(self) -> None:
        """Runs a step, and sends what is new."""
        self._send_outputs(self._engine.step())

    def _read(self) -> None:
        """Takes messages until the pipe ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: ToEngine = self._pipe.recv()
                if isinstance(message, Stop):
                    break
                self.take(message)
        with self._has_news:
            self._is_stopping = True
            self._has_news.notify()

    def take(self, message: ToEngine) -> None:
        """Does what a message says."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.request_id)
        elif isinstance(message, ReadStatistics):
            self._send(self._engine.statistics())
        elif isinstance(message, Wake):
            self._notify()

    def _submit(self, message: Submit) -> None:
        try:
            constraint = None
            if message.grammar is not None:
                if self._grammars is None:
                    vocab_size = self._engine.limits.vocab_size
                    self._grammars = grammars_of(self._tokenizer, vocab_size)
                constraint = self._grammars.compiled(message.grammar)
            self._engine.submit(
                message.prompt,
                message.parameters,
                request_id=message.request_id,
                needs_text=message.needs_text,
                constraint=constraint,
                salt=message.salt,
                destination=message.destination,
            )
        except KernelcatError as error:
            self._send(Refused(message.request_id, error))
        self._notify()  # also of a refusal: the other ranks have been woken for this request

    def _notify(self) -> None:
        """Lets the thread that runs steps look whether there is work."""
        with self._has_news:
            self._has_news.notify()

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._send(Outputs(outputs))

    def _send(self, message: FromEngine) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError):  # the server has ended
            self._pipe.send(message)


def main() -> None:
    """Opens the engine that the first message names, and runs it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    try:
        message: Open = pipe.recv()
        server = opened(message, pipe)
    except KernelcatError as error:
        return pipe.send(Refused("", error))
    except EOFError:  # the server has ended
        return
    pipe.send(Ready(server.limits))
    server.run()


def opened(message: Open, pipe: Connection) -> EngineServer:
    """The engine that ``message`` asks for, behind ``pipe``."""
    tokenizer = message.source.tokenizer()
    if message.side is not None:
        from kernelcat.moe.disaggregate.servers import open_side

        return open_side(message.side, message.source, message.settings, tokenizer, pipe)
    if message.member is not None:
        from kernelcat.moe.parallel.expert_server import ExpertServer

        member = message.member.engine(message.source, message.settings, tokenizer.decode)
        return ExpertServer(member, tokenizer, pipe)
    engine = Engine(message.source.open(), message.settings, tokenizer.decode)
    return EngineServer(engine, tokenizer, pipe)


if __name__ == "__main__":
    main()
