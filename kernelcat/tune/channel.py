"""Requests to a child process and replies from it, as pickles over the child's standard streams.

The parent kills a child that does not answer in time, and notices at once when a child dies. The
error then contains the end of the child's standard error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Protocol

from kernelcat.errors import KernelcatError
from kernelcat.runtime import children
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Failed, Reply, Request

FAULTS = frozenset(
    getattr(signal, name) for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT",
                                       "SIGTRAP", "SIGSYS") if hasattr(signal, name)
)  # fmt: skip
"""Signals that a process raises by a fault of its own."""
TAIL_BYTES = 600
"""Bytes at the end of a dead child's standard error that become part of the error message."""


@dataclass(frozen=True)
class Announcement:
    """Message from the child: the candidate that runs next, so that a hang can be attributed."""

    candidate: Candidate


class ChildTimeout(Exception):
    """The child did not answer in time; it has been killed."""


class ChildDied(Exception):
    """The child ended before it answered; the text has its exit status or signal.

    ``outside`` is whether another process ended the child, by a signal that no fault raises. Linux
    ends a process that way too when memory runs out.
    """

    def __init__(self, text: str, outside: bool = False) -> None:
        super().__init__(text)
        self.outside = outside


class Stopped(Exception):
    """The child was ended because the tune ends: no candidate failed, and nothing is recorded."""


class Lost(KernelcatError):
    """The machine of the child is gone, with everything that ran there: no candidate failed."""


class Link(Protocol):
    """The parent's end of the connection to a child: :class:`Channel`, or another to a machine
    elsewhere.

    ``announced`` is the last candidate that the child announced.
    """

    announced: Candidate | None

    def request(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        """As :meth:`Channel.request`; raises ``Lost`` too."""
        ...

    def kill(self) -> None:
        """Ends the child at once."""
        ...


Start = Callable[..., Link]
"""Starts a module of this package in a child, with the module's name and its arguments."""


class Channel:
    """The parent's end of the connection to a child: starts a module of this package."""

    def __init__(self, module: str, *args: str) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.announced: Candidate | None = None
        self.process = children.start(
            children.python(module, *args),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: the child ended
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, request: Request[Reply], timeout: float) -> Reply | Failed:
        """Sends ``request`` and waits for the reply.

        Afterwards ``announced`` is the last candidate that the child announced. ``timeout`` is in
        seconds, and starts again with each announcement.

        Raises
        ------
        ChildTimeout, ChildDied
            The child is dead, and the channel cannot be used any more.
        """
        assert self.process.stdin is not None
        self.announced = None
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: kill() closed the stream
            raise self._died() from error
        while True:
            try:
                message = self._received.get(timeout=timeout)
            except queue.Empty:
                self.kill()
                raise ChildTimeout(f"no answer in {timeout:g} s") from None
            if message is None:
                raise self._died()
            if not isinstance(message, Announcement):
                reply: Reply | Failed = message
                return reply
            self.announced = message.candidate

    def kill(self) -> None:
        """Ends the child at once, with all processes that it started."""
        children.stop(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        # kill() may close the stream, and the stream may end in the middle of a message.
        with contextlib.suppress(ValueError, OSError, EOFError, pickle.UnpicklingError):
            while True:
                self._received.put(pickle.load(self.process.stdout))
        self._received.put(None)

    def _died(self) -> ChildDied:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            children.stop(self.process)
            code = self.process.returncode
        how = children.ending(code)
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = " ".join(self.log.read().decode(errors="replace").split())
        self.kill()
        outside = code < 0 and -code not in FAULTS
        return ChildDied(f"{how}: {tail}" if tail else how, outside)


class Server:
    """The child's end. Its standard output carries replies; prints go to standard error."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C

    def send(self, message: Any) -> None:
        pickle.dump(message, self.out)
        self.out.flush()

    def announce(self, candidate: Candidate) -> None:
        self.send(Announcement(candidate))

    def serve(self, answer: Callable[[Any], Any]) -> None:
        """Answers requests until the parent closes the channel, or until a reply is fatal."""
        while True:
            try:
                request = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            reply = answer(request)
            self.send(reply)
            if isinstance(reply, Failed) and reply.fatal:
                os._exit(1)
