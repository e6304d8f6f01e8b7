"""The process of a rank that follows rank 0: ``python -m kernelcat.moe.parallel.follower FD``.

It opens its part of the model, builds the same runner as rank 0, and runs the steps that it is
told. It ends when rank 0 ends. It ignores SIGINT and SIGTERM, which a terminal sends to it too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from multiprocessing.connection import Connection

from kernelcat.errors import KernelcatError, RankFailed
from kernelcat.moe.engine.building import build
from kernelcat.moe.engine.limits import MAX_IN_FLIGHT
from kernelcat.moe.engine.request import describe
from kernelcat.moe.engine.runner import Run, Runner
from kernelcat.moe.engine.step import Step
from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel.messages import Build, Join, Launch, Message


class Follower:
    """Runs the steps that rank 0 sends, until the pipe ends."""

    def __init__(self, model: Decoder, pipe: Connection) -> None:
        self._model, self._pipe = model, pipe
        self._runner: Runner | None = None
        self._runs: deque[Run] = deque()

    def run(self) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                message: Message = self._pipe.recv()
                if isinstance(message, Launch):
                    self._launch(message)
                    continue
                if self._runner is not None:
                    self._runner.close()
                    self._runner = None
                if isinstance(message, Build):
                    _, self._runner = build(self._model, message.settings)

    def _launch(self, message: Launch) -> None:
        """Launch a step, when the step that had its buffers before has ended."""
        assert self._runner is not None
        if len(self._runs) == MAX_IN_FLIGHT:
            self._runner.collect(self._runs.popleft())
        run = Run(Step(message.index), message.choices)
        self._runner.receive(run, message.size, message.data)
        self._runner.launch(run)
        self._runs.append(run)


def main() -> None:
    """Be the rank that the first message names."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]), writable=False)
    message: Join = pipe.recv()
    exchange = None
    try:
        exchange = message.source.join(message.rank, message.path)
        Follower(message.source.part(exchange), pipe).run()
        exchange.close()
    except RankFailed:
        pass  # rank 0 says so
    except Exception as error:
        if exchange is not None:
            exchange.fail(describe(error))
        if not isinstance(error, KernelcatError):
            raise
    os._exit(0)  # what libraries do at exit may wait for ranks that have ended


if __name__ == "__main__":
    main()
