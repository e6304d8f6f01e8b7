"""Server-sent events: a response whose parts are sent as they come."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not hold events back
]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(content: Any) -> bytes:
    """The event whose data is the JSON of ``content``."""
    return b"data: " + to_json(content) + b"\n\n"


def to_json(content: Any) -> bytes:
    """Compact JSON in UTF-8; half of a surrogate pair becomes ``?``."""
    return _encode(content).encode(errors="replace")


class EventStream:
    """An ASGI response that sends events.

    Whoever watches for the client's disconnect ends ``events``; this response does not.

    Parameters
    ----------
    first : the event that is there already; the status can no longer change
    events : all others
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
