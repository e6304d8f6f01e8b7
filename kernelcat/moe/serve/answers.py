"""From the pieces of a call to an answer: one JSON body, or a stream of events.

Both endpoints have choices; a choice turns pieces into deltas, and a whole answer is what the
deltas add up to. So a stream and a body cannot differ.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from kernelcat.moe.engine.async_engine import RequestOutput
from kernelcat.moe.serve import errors
from kernelcat.moe.serve.calls import Call, ClientGone, Job
from kernelcat.moe.serve.requests import Sampling
from kernelcat.moe.serve.service import Service, usage
from kernelcat.moe.serve.sse import DONE, EventStream, event, to_json

log = logging.getLogger(__name__)


class Choice(ABC):
    """One choice of an answer.

    Attributes
    ----------
    finish_reason : None while the choice goes on
    is_stopped : whether the choice is complete although the engine would go on
    num_reasoning : tokens of the chain of thought
    """

    finish_reason: str | None = None
    is_stopped = False
    num_reasoning = 0

    @abstractmethod
    def push(self, output: RequestOutput) -> dict[str, Any] | None:
        """The fields that ``output`` adds to the choice in a stream; None for nothing to send."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The fields of the complete choice."""


class Answer:
    """An answer to one call.

    Parameters
    ----------
    service : the server's parts
    body : the request
    jobs : what the engine is asked, a job for each of ``choices``
    head : first fields of the JSON: id, created, model
    kinds : the field ``object`` of a body, and of an event
    """

    def __init__(
        self,
        service: Service,
        body: Sampling,
        jobs: list[Job],
        choices: list[Choice],
        head: dict[str, Any],
        kinds: tuple[str, str],
    ) -> None:
        self._service, self._body = service, body
        self._jobs, self._choices = jobs, choices
        self._head, self._kinds = head, kinds
        self._num_ended = 0

    async def respond(self, request: Request) -> ASGIApp:
        """Runs the call.

        Errors before the first event have their own status; later ones are events.

        Raises
        ------
        ApiError, InvalidArgument, QueueFull
            The request is refused or has failed.
        ClientGone
            Nobody waits for the answer.
        """
        if not self._body.stream:
            return await self._complete(request)
        events = self._events(request)
        return EventStream(await anext(events), events)

    async def _complete(self, request: Request) -> Response:
        async for _ in self._deltas(request):
            pass
        choices = [
            {"index": index, **choice.whole(), "finish_reason": choice.finish_reason}
            for index, choice in enumerate(self._choices)
        ]
        content = self._content(self._kinds[0], choices) | {"usage": self._usage()}
        return Response(to_json(content), media_type="application/json")

    async def _events(self, request: Request) -> AsyncGenerator[bytes]:
        options = self._body.stream_options
        has_usage = options is not None and options.include_usage
        is_continuous = options is not None and options.continuous_usage_stats
        num_sent = 0
        try:
            async for choice in self._deltas(request):
                content = self._content(self._kinds[1], [choice])
                if has_usage:
                    content["usage"] = self._usage() if is_continuous else None
                yield event(content)
                num_sent += 1
        except ClientGone:
            if not num_sent:
                raise
            self._service.metrics.broken_streams.labels("client gone").inc()
            return
        except Exception as error:
            if not num_sent:
                raise
            answer = errors.of(error)
            self._service.metrics.broken_streams.labels(answer.code or "error").inc()
            errors.report(log, "a stream", error)
            yield event(answer.body)
            return
        if has_usage:
            yield event(self._content(self._kinds[1], []) | {"usage": self._usage()})
        yield DONE

    async def _deltas(self, request: Request) -> AsyncGenerator[dict[str, Any]]:
        """What each piece adds, as an element of ``choices`` in a stream."""
        call: Call = self._service.calls.start(self._jobs, request.receive)
        try:
            async for piece in call.pieces():
                choice = self._choices[piece.index]
                fields = choice.push(piece.output)
                if choice.is_stopped and piece.output.finish_reason is None:
                    call.end_choice(piece.index)
                if fields is not None or choice.finish_reason is not None:
                    reason = {"finish_reason": choice.finish_reason}
                    yield {"index": piece.index, **(fields or {}), **reason}
        finally:
            self._service.calls.end(call)

    def _content(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        num_reasoning = [choice.num_reasoning for choice in self._choices]
        return usage(self._jobs, sum(num_reasoning) if any(num_reasoning) else None)
