"""The process of a server: uvicorn, signals, and an end within a grace time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kernelcat.moe.serve.service import Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MARGIN = 5.0
"""Seconds in which the answers to requests that did not end in time are written."""


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM and SIGINT end the process with status 0.

    After the first signal the server accepts no connection, requests that run have the grace time
    to end, and requests that are left get an error. A second signal ends the grace time. The server
    also ends so when the engine has stopped.

    Parameters
    ----------
    announce : gets the URL when connections are accepted, so that port 0 may be any free one

    Attributes
    ----------
    service : the server's parts
    has_failed : whether the server ended because the engine has stopped
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, announce: Callable[[str], Any]
    ) -> None:
        super().__init__(config)
        self.service, self._announce = service, announce
        self.has_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, and announces the URL."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Handles signals while the server runs, if it runs in the main thread."""
        loop = asyncio.get_running_loop()
        try:
            for number in SIGNALS:
                loop.add_signal_handler(number, self.end)
        except (RuntimeError, ValueError):  # not in the main thread: its owner calls `end`
            yield
            return
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    async def on_tick(self, counter: int) -> bool:
        """Ends the server when the engine cannot run any more."""
        if not self.service.engine.is_healthy and not self.should_exit:
            self.has_failed = True
            self.end()
        return await super().on_tick(counter)

    def end(self) -> None:
        """Begins to end, or ends the grace time. Call it in the event loop's thread."""
        if self.should_exit:
            self.service.abort()
        else:
            self.should_exit = True
            self.service.drain()


def make_server(app: Starlette, service: Service, announce: Callable[[str], Any]) -> Server:
    """A server for ``app``; ``run`` blocks until a signal ends it."""
    settings = service.settings
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        lifespan="on",
        server_header=False,
        backlog=4096,
        timeout_graceful_shutdown=int(settings.grace + MARGIN),
        ws="none",
    )
    return Server(config, service, announce)
