"""The rendezvous: ranks of one host exchange values and file descriptors over a Unix socket.

Rank 0 is the hub: it collects what all ranks send and sends it to all. A rank that ends, fails or
does not come in time is an error on every rank, with the same text.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelcat.errors import InvalidArgument, RankFailed

JOIN_S = 60.0
"""Seconds in which all ranks must have come: their processes start and import libraries."""
WAIT_S = 10.0
"""Seconds in which all ranks must have answered."""
GRACE_S = 2.0
"""Seconds that other ranks wait longer than the hub, whose answer names the rank that is late."""

WATCH_S = 0.5
"""Seconds between two looks at ranks that have not come."""

_HEADER = struct.Struct("<I")
_RETRY_S = 0.02
_MAX_FILES = 16  # of one message: more than a host has ranks

Watch = Callable[[], None]


class Rendezvous:
    """Rank ``rank`` of ``ranks``, which meet at the socket ``path``.

    ``watch`` is called now and then while rank 0 waits for others, and may raise ``RankFailed``.
    All limits of waiting are multiplied by ``slowness``, for processes that run under a tool.

    Raises
    ------
    InvalidArgument
        ``rank`` is not below ``ranks``.
    RankFailed
        A rank did not come within ``join_s`` seconds, or ranks count each other differently.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        path: Path,
        join_s: float = JOIN_S,
        watch: Watch | None = None,
        slowness: float = 1.0,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank {rank} is not one of the {ranks} from 0 to {ranks - 1}")
        self.rank, self.ranks, self.slowness = rank, ranks, slowness
        self._peers: dict[int, socket.socket] = {}
        deadline = time.monotonic() + join_s * slowness
        if rank == 0:
            self._accept(path, deadline, watch)
        else:
            self._connect(path, deadline)
        self.gather(ranks, limit_s=join_s)

    def gather(
        self, value: Any, fd: int | None = None, limit_s: float = WAIT_S
    ) -> tuple[list[Any], list[int]]:
        """The values of all ranks, in their order, and descriptors of the files of all.

        ``value`` is anything that JSON holds. ``fd`` is an open file that all ranks get; either all
        ranks give one or none does. The others' files have new descriptors.

        Raises
        ------
        RankFailed
            A rank ended, failed, or did not call this function within ``limit_s`` seconds.
        """
        message = {"value": value}
        limit_s *= self.slowness
        if self.rank:
            with contextlib.suppress(RankFailed):  # the hub has ended: it may have said why
                self._send(0, message, [] if fd is None else [fd])
            answer, fds = self._receive(0, time.monotonic() + limit_s + GRACE_S)
            if "failed" in answer:
                raise RankFailed(answer["failed"])
            if fd is not None:
                os.close(fds[self.rank])
                fds[self.rank] = fd
            return answer["values"], fds
        try:
            values, fds = self._collect(message, fd, time.monotonic() + limit_s)
        except RankFailed as error:
            self.fail(str(error))
            raise
        for peer in self._peers:
            self._send(peer, {"values": values}, fds)
        return values, fds

    def fail(self, reason: str) -> None:
        """Let the others' next :meth:`gather` fail with ``reason``."""
        for peer in self._peers:
            with contextlib.suppress(RankFailed):  # it has ended already
                self._send(peer, {"failed": reason}, [])

    def close(self) -> None:
        """Leave; the others see that this rank has ended."""
        for peer in self._peers.values():
            peer.close()

    def _accept(self, path: Path, deadline: float, watch: Watch | None) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(self.ranks)
            while len(self._peers) < self.ranks - 1:
                listener.settimeout(min(max(deadline - time.monotonic(), 0.001), WATCH_S))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if watch is not None:
                        watch()
                    if time.monotonic() < deadline:
                        continue
                    missing = sorted({*range(1, self.ranks)} - {*self._peers})
                    reason = f"{_ranks(missing)} did not come in time"
                    self.fail(reason)
                    raise RankFailed(reason) from None
                hello, _ = _read(connection, deadline)
                self._peers[hello["rank"]] = connection

    def _connect(self, path: Path, deadline: float) -> None:
        connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connection.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise RankFailed("rank 0 did not come in time") from None
                time.sleep(_RETRY_S)
        self._peers[0] = connection
        self._send(0, {"rank": self.rank}, [])

    def _collect(self, own: Any, fd: int | None, deadline: float) -> tuple[list[Any], list[int]]:
        """The messages of all ranks, in whatever order they come."""
        values, files = {0: own["value"]}, {} if fd is None else {0: fd}
        waiting = {connection: rank for rank, connection in self._peers.items()}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise RankFailed(f"{_ranks(sorted(waiting.values()))} did not answer in time")
            for connection in ready:
                rank = waiting.pop(connection)
                message, fds = self._receive(rank, deadline)
                if "failed" in message:
                    raise RankFailed(f"rank {rank}: {message['failed']}")
                values[rank] = message["value"]
                files |= {rank: fds[0]} if fds else {}
        return [values[rank] for rank in range(self.ranks)], [files[r] for r in sorted(files)]

    def _send(self, peer: int, message: Any, fds: Sequence[int]) -> None:
        try:
            _write(self._peers[peer], message, fds)
        except OSError as error:
            raise RankFailed(f"rank {peer} has ended") from error

    def _receive(self, peer: int, deadline: float) -> tuple[Any, list[int]]:
        try:
            return _read(self._peers[peer], deadline)
        except TimeoutError as error:
            raise RankFailed(f"rank {peer} did not answer in time") from error
        except (OSError, EOFError) as error:
            raise RankFailed(f"rank {peer} has ended") from error


def by_rank(reasons: Sequence[str]) -> str:
    """What each rank says, as one line; empty where none says anything."""
    if len(set(reasons)) == 1:
        return reasons[0]
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def require_equal(texts: Sequence[str], does: str) -> None:
    """Raise ``RankFailed`` unless all ranks do the same: ``rank 1 loads A, but rank 0 loads B``."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise RankFailed(f"rank {rank} {does} {text}, but rank 0 {does} {texts[0]}")


def _ranks(numbers: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 2``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _write(connection: socket.socket, message: Any, fds: Sequence[int]) -> None:
    """A message: four bytes of length, with the files, and JSON."""
    text = json.dumps(message).encode()
    socket.send_fds(connection, [_HEADER.pack(len(text))], list(fds))
    connection.sendall(text)


def _read(connection: socket.socket, deadline: float) -> tuple[Any, list[int]]:
    """The next message and its files; ``EOFError`` where the other end has closed."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    header, fds, _, _ = socket.recv_fds(connection, _HEADER.size, _MAX_FILES)
    text = bytearray()
    if len(header) < _HEADER.size:
        raise EOFError
    (size,) = _HEADER.unpack(header)
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            raise EOFError
        text += part
    return json.loads(text), fds
