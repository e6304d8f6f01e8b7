"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import logging
import re
from typing import Any

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.engine.limits import QueueFull


class ApiError(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status : HTTP status
    message : one sentence that says what to do
    kind : the field ``type``
    param : the field of the request that is at fault
    code : a word that programs compare
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.kind, self.param, self.code = kind, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: when a client may try again, and how to authenticate."""
        if self.status in (429, 503):
            return {"retry-after": "1"}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def unsupported(param: str, reason: str) -> ApiError:
    """The answer to a parameter that this server does not have."""
    return ApiError(400, f"{param} is not supported: {reason}", param=param, code="unsupported")


def failed(message: str) -> ApiError:
    """The answer to a request that failed inside of the server."""
    return ApiError(500, message, "server_error", code="internal_error")


def shutting_down() -> ApiError:
    """The answer to requests while the server ends."""
    return ApiError(503, "the server is shutting down", "server_error", code="shutting_down")


def report(log: logging.Logger, name: str, error: Exception) -> None:
    """Logs that ``name`` failed; an error that nobody expected with its traceback."""
    is_expected = isinstance(error, (ApiError, KernelcatError))
    log.error("%s failed: %s", name, error, exc_info=None if is_expected else error)


def of(error: Exception) -> ApiError:
    """What ``error`` of the engine is to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, EngineError):
        return ApiError(503, str(error), "server_error", code="engine_stopped")
    if isinstance(error, InvalidArgument):
        message = str(error)
        named = re.match(r"(\w+)(?:=| has )", message)
        is_length = "has room for" in message
        return ApiError(
            400,
            message,
            param=named[1] if named and not is_length else None,
            code="context_length_exceeded" if is_length else None,
        )
    return failed("internal error: the server's log has the details")
