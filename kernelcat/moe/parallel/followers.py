"""The processes of a model's other ranks, as rank 0 sees them.

Rank 0 schedules steps and answers requests. The others get what a step needs from the host, and
launch the same kernels in the same order; what they compute meets in exchanges.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kernelcat.errors import RankFailed
from kernelcat.moe.parallel.exchange import ANSWER_S, END_S
from kernelcat.moe.parallel.messages import Join, Message
from kernelcat.runtime import children

if TYPE_CHECKING:
    from kernelcat.moe.source import ModelSource

FOLLOWER = "kernelcat.moe.parallel.follower"


class Followers:
    """Ranks 1 to ``source.tp`` - 1 of a model; they end with the thread that makes this object.

    Attributes
    ----------
    path : the socket at which all ranks meet
    """

    def __init__(self, source: ModelSource) -> None:
        self._folder = TemporaryDirectory(prefix="kernelcat-")
        self.path = Path(self._folder.name) / "ranks"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for rank in range(1, source.tp):
            self._start()
            self._send(rank, Join(source, rank, self.path))

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes' guards, with which the processes end."""
        return [process.pid for process in self._processes]

    def send(self, message: Message) -> None:
        """Send ``message`` to all; raises ``RankFailed`` where one has ended or takes nothing."""
        for rank in range(1, 1 + len(self._pipes)):
            self._send(rank, message)

    def check(self) -> None:
        """Raise ``RankFailed`` if a process has ended, which says why on standard error."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise RankFailed(f"rank {rank} has ended: {children.ending(process.returncode)}")

    def end(self) -> None:
        """Let the processes end by themselves."""
        for pipe in self._pipes:
            pipe.close()

    def wait(self, limit_s: float = END_S) -> None:
        """Wait until the processes have ended; after ``limit_s`` seconds they are killed."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            children.stop(process)
        self._folder.cleanup()

    def _start(self) -> None:
        process, end = children.start_with_socket(FOLLOWER)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_S), 0))
        self._processes.append(process)
        self._pipes.append(Connection(end.detach(), readable=False))

    def _send(self, rank: int, message: Message) -> None:
        try:
            self._pipes[rank - 1].send(message)
        except BlockingIOError as error:  # the time is over
            raise RankFailed(f"rank {rank} did not take a step in time") from error
        except OSError as error:
            raise RankFailed(f"rank {rank} has ended") from error
