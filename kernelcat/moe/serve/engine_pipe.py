"""The process of an engine, and the pipe to it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection

from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.serve.engine_messages import FromEngine, Open, Ready, Refused, ToEngine
from kernelcat.runtime import children

CHILD = "kernelcat.moe.serve.engine_child"
END_TIMEOUT = 30.0
"""Seconds in which the process ends after its last request, or is killed."""


class EnginePipe:
    """A process with an engine. It ends with the thread that makes this object.

    The process starts at once; `wait_until_ready` waits for its engine.

    Parameters
    ----------
    message : which engine
    env : environment variables of the process; None for those of this one

    Attributes
    ----------
    connection : the pipe's end, for those who wait for several
    """

    def __init__(self, message: Open, env: Mapping[str, str] | None = None) -> None:
        self._process, end = children.start_with_socket(CHILD, env=env)
        self.connection = Connection(end.detach())
        self._sending = threading.Lock()
        self.send(message)

    @property
    def process_id(self) -> int:
        """The id of the process's guard, with which the process ends."""
        return self._process.pid

    def wait_until_ready(self) -> Limits:
        """The engine's limits, when it runs.

        Raises
        ------
        KernelcatError
            What opening the model and the engine raise.
        EngineError
            The process has ended without saying why.
        """
        try:
            answer = self.receive()
        except EOFError:
            status = self._process.wait()
            raise EngineError(f"the engine's process ended with status {status}") from None
        if isinstance(answer, Refused):
            self._process.wait()
            raise answer.error
        assert isinstance(answer, Ready)
        return answer.limits

    def send(self, message: ToEngine) -> None:
        """Sends a message; nothing happens if the process has ended: whoever receives sees that."""
        with self._sending, contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> FromEngine:
        """The next message; raises ``EOFError`` when the process has ended."""
        try:
            message: FromEngine = self.connection.recv()
        except OSError as error:
            raise EOFError from error
        return message

    def join(self) -> None:
        """Waits until the process ends, which has been told to; kills it after `END_TIMEOUT`."""
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        children.stop(self._process)
