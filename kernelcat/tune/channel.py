"""A child process that answers requests: one JSON object a line, each way.

The parent owns the clock. A child that does not answer in time is killed, one that dies is
noticed at once, and what it last printed to its standard error is the explanation.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

Message = dict[str, Any]
TAIL = 600


class ChildTimeout(Exception):
    """The child did not answer in time; it has been killed."""


class ChildDied(Exception):
    """The child ended before it answered; the text says how."""


class Stopped(Exception):
    """The tune is ending, and so did the child: nobody is to blame, and nothing is written down."""


class Channel:
    """The parent's end: starts ``python -m MODULE ARGS`` and talks to it."""

    def __init__(self, module: str, *args: str) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.announced = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            process_group=0,  # Ctrl-C on the terminal is for the parent alone
        )
        self._replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, op: str, timeout: float, **args: Any) -> Message:
        """Ask, and wait for the reply; ``announced`` follows what the child says it is doing.

        Raises
        ------
        ChildTimeout, ChildDied
            The channel is dead afterwards.
        """
        assert self.process.stdin is not None
        self.announced = ""
        try:
            self.process.stdin.write(json.dumps({"op": op, **args}).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed by kill()
            raise self._died() from error
        return self._reply(timeout)

    def _reply(self, timeout: float) -> Message:
        while True:
            try:
                message = self._replies.get(timeout=timeout)
            except queue.Empty:
                self.kill()
                raise ChildTimeout(f"no answer in {timeout:g} s") from None
            if message is None:
                raise self._died()
            if "announce" not in message:
                return message
            self.announced = message["announce"]

    def kill(self) -> None:
        """End the child at once, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed by kill()
            for line in self.process.stdout:
                self._replies.put(json.loads(line))
        self._replies.put(None)

    def _died(self) -> ChildDied:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - TAIL))
        tail = " ".join(self.log.read().decode(errors="replace").split())
        self.kill()
        return ChildDied(f"{how}: {tail}" if tail else how)


class Server:
    """The child's end. Standard output is the channel; what libraries print goes to the log."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        die_with_parent()

    def send(self, message: Message) -> None:
        self.out.write(json.dumps(message).encode() + b"\n")
        self.out.flush()

    def announce(self, what: str) -> None:
        self.send({"announce": what})

    def serve(self, handle: Callable[[Message], Message]) -> None:
        """Answer until the parent closes the channel, or a reply says ``fatal``."""
        for line in sys.stdin.buffer:
            reply = handle(json.loads(line))
            self.send(reply)
            if reply.get("fatal"):
                os._exit(1)


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent is gone, even in a loop."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
