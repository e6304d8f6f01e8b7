"""A client that puts a load of requests on a server and measures it.

The client speaks HTTP/1.1 by `httptools`, one connection a request, and reads times when bytes
arrive, so that one process can read some ten thousand events a second. The server may be any that
has OpenAI's /v1/completions with token ids as prompts and vLLM's ``ignore_eos``.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.serving_metrics import Timeline
from kernelcat.moe.workload import Arrival

TIMEOUT = 600.0
"""Seconds after which a request counts as failed."""


class ServerUnreachable(KernelcatError):
    """The server does not answer, or answers something else than a list of models."""


@dataclass(frozen=True)
class Target:
    """A server and a model.

    Attributes
    ----------
    url : ``http://host:port``, with or without ``/v1``
    model : the name that requests give
    vocab_size : ids of tokens in prompts are less
    api_key : "" for none
    """

    url: str
    model: str
    vocab_size: int
    api_key: str = ""

    @classmethod
    def find(cls, url: str, model: str = "", vocab_size: int = 0, api_key: str = "") -> Target:
        """Asks the server for what is not given: the first model, and its vocabulary.

        Raises
        ------
        ServerUnreachable
            The server has no list of models.
        InvalidArgument
            The URL is not valid, or the server does not name the size of the vocabulary.
        """
        url = url.rstrip("/").removesuffix("/v1")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise InvalidArgument(f"{url!r} is no URL; write http://127.0.0.1:8000")
        if not (model and vocab_size):
            entry = _first_model(url, model, api_key)
            model, vocab_size = entry["id"], vocab_size or entry.get("vocab_size", 0)
        if not vocab_size:
            raise InvalidArgument("the server does not name vocab_size: give --vocab-size")
        return cls(url, model, vocab_size, api_key)


def _first_model(url: str, model: str, api_key: str) -> dict[str, Any]:
    """The entry of ``model`` in the server's list, or the first one."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            entries = json.load(answer)["data"]
    except (OSError, ValueError, KeyError) as error:
        raise ServerUnreachable(f"{url}/v1/models: {error}") from error
    chosen = [entry for entry in entries if model in ("", entry["id"])]
    if not chosen:
        names = ", ".join(entry["id"] for entry in entries)
        raise InvalidArgument(f"the server has no model {model!r}; it has {names}")
    entry: dict[str, Any] = chosen[0]
    return entry


async def run(target: Target, arrivals: Sequence[Arrival]) -> list[Timeline]:
    """Sends each request when it is due; the times are seconds of the monotonic clock."""
    start = time.monotonic()
    return await asyncio.gather(*(_request(target, arrival, start) for arrival in arrivals))


async def _request(target: Target, arrival: Arrival, start: float) -> Timeline:
    """Sends one request when it is due, and reads its stream to the end."""
    due = start + arrival.time
    await asyncio.sleep(due - time.monotonic())
    parts = urlsplit(target.url)
    is_tls = parts.scheme == "https"
    stream = _Stream(_request_bytes(target, arrival, parts.netloc, parts.path))
    transport = None
    try:
        async with asyncio.timeout(TIMEOUT):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: stream,
                parts.hostname or "",
                parts.port or (443 if is_tls else 80),
                ssl=ssl.create_default_context() if is_tls else None,
            )
            await stream.ended
    except TimeoutError:
        stream.error = f"no end within {TIMEOUT:g} s"
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        stream.error = f"connection failed: {reason}"
    finally:
        if transport is not None:
            transport.close()
    return Timeline(due, stream.times, stream.num_tokens, stream.num_prompt, stream.error)


def _request_bytes(target: Target, arrival: Arrival, host: str, path: str) -> bytes:
    """The whole HTTP request."""
    body = json.dumps(
        {
            "model": target.model,
            "prompt": list(arrival.prompt),
            "max_tokens": arrival.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    key = f"authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    head = (
        f"POST {path}/v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{key}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Stream(asyncio.Protocol):
    """A connection with one request, whose answer is a stream of events.

    Attributes
    ----------
    ended : done when the answer, or the connection, has ended
    times : when events with output arrived
    num_tokens, num_prompt : from ``usage`` in the last event
    error : why the request failed, or ""
    """

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.times: list[float] = []
        self.num_tokens = self.num_prompt = 0
        self.error = "the connection ended before the answer"
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self.error)

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a piece of the answer's body."""
        if self._parser.get_status_code() != 200:
            self._buffer += body
            return
        now = time.monotonic()
        *events, self._buffer = (self._buffer + body).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.error = ""
            elif data:
                self._take(json.loads(data), now)

    def _take(self, content: dict[str, Any], now: float) -> None:
        if "error" in content:
            return self._end(f"error in the stream: {content['error'].get('message')}")
        if content.get("choices"):
            self.times.append(now)
        if usage := content.get("usage"):
            self.num_tokens = usage["completion_tokens"]
            self.num_prompt = usage["prompt_tokens"]

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the answer."""
        status = self._parser.get_status_code()
        self._end(self.error if status == 200 else f"HTTP status {status}")

    def _end(self, error: str) -> None:
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)
