"""The web application: routes, authentication, the limit of bodies, and errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.serve import errors
from kernelcat.moe.serve.calls import ClientGone
from kernelcat.moe.serve.chat import chat
from kernelcat.moe.serve.completions import completions
from kernelcat.moe.serve.errors import ApiError
from kernelcat.moe.serve.service import Service
from kernelcat.moe.serve.sse import to_json

log = logging.getLogger(__name__)

Handler = Callable[[Service, Request, bytes], Awaitable[ASGIApp]]
DISCARDED_BODIES = 16
"""A body that is too large is read up to so many times the limit, so that the client hears why."""
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection; nobody receives it."""


def make_app(service: Service) -> Starlette:
    """The application of ``service``; the engine runs while the application runs."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.engine.start()
        try:
            yield
        finally:
            await service.engine.stop()

    async def models(request: Request) -> ASGIApp:
        entries = [_model(service)]
        return _json({"object": "list", "data": entries})

    async def model(request: Request) -> ASGIApp:
        service.check_model(request.path_params["name"])
        return _json(_model(service))

    async def health(request: Request) -> Response:
        if service.is_draining:
            return _error(errors.shutting_down())
        if not service.engine.is_healthy:
            return _error(errors.of(EngineError("the engine has stopped")))
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def post(path: str, handler: Handler) -> Route:
        return Route(path, _endpoint(service, path, handler), methods=["POST"])

    def get(path: str, handler: Callable[[Request], Awaitable[ASGIApp]]) -> Route:
        async def without_body(_: Service, request: Request, __: bytes) -> ASGIApp:
            return await handler(request)

        return Route(path, _endpoint(service, path, without_body), methods=["GET"])

    routes = [
        post("/v1/chat/completions", chat),
        post("/v1/completions", completions),
        get("/v1/models", models),
        get("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _endpoint(service: Service, path: str, handler: Handler) -> Callable[..., Any]:
    """``handler`` behind authentication and the limit of bodies; errors become answers."""

    async def endpoint(request: Request) -> ASGIApp:
        status = 200
        try:
            _authenticate(service, request)
            if service.is_draining:
                raise errors.shutting_down()
            return await handler(service, request, await _body(request, service.settings.max_body))
        except (ClientGone, ClientDisconnect):
            status = CLIENT_GONE
            return Response(status_code=status)
        except Exception as error:
            answer = errors.of(error)
            status = answer.status
            if status == 500:
                errors.report(log, path, error)
            return _error(answer)
        finally:
            service.metrics.responses.labels(path, str(status)).inc()

    return endpoint


def _authenticate(service: Service, request: Request) -> None:
    """Refuses a request without a valid key, where keys are needed."""
    keys = service.settings.api_keys
    if not keys:
        return
    kind, _, presented = request.headers.get("authorization", "").partition(" ")
    # compares with all keys, in a time that does not depend on how much of a key is right
    matches = [hmac.compare_digest(key.encode(), presented.strip().encode()) for key in keys]
    if kind.lower() != "bearer" or not any(matches):
        raise ApiError(
            401,
            "invalid API key: send the header Authorization: Bearer KEY",
            "authentication_error",
            code="invalid_api_key",
        )


async def _body(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises
    ------
    ApiError
        The body has more than ``limit`` bytes; what is too much is not kept.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > DISCARDED_BODIES * limit:
            break
    if size > limit:
        message = f"the body has more than {limit} bytes, the limit of this server"
        raise ApiError(413, message, code="body_too_large")
    return b"".join(parts)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.settings.model,
        "object": "model",
        "created": service.created,
        "owned_by": "kernelcat",
        "max_model_len": service.engine.limits.context,
        "vocab_size": service.tokenizer.vocab_size,
    }


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


def _error(error: ApiError) -> Response:
    return _json(error.body, error.status, error.headers)


def _http_error(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods, in the format of all other errors."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _error(ApiError(error.status_code, message))
