"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from kernelcat.moe.engine.async_engine import RequestOutput
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.serve.answers import Answer, Choice
from kernelcat.moe.serve.calls import Job
from kernelcat.moe.serve.errors import ApiError
from kernelcat.moe.serve.logprobs import CompletionLogprobs
from kernelcat.moe.serve.requests import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    CompletionRequest,
)
from kernelcat.moe.serve.service import Service, new_id


async def completions(service: Service, request: Request, content: bytes) -> ASGIApp:
    """Continues one or several prompts; see `Answer.respond` for errors."""
    body = CompletionRequest.parse(content)
    service.check_model(body.model)
    body.check()
    prompts = body.prompts
    if len(prompts) * body.n > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n={body.n} must be {MAX_CHOICES} choices at most"
        raise ApiError(400, message, param="prompt")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    constraint = await service.constraints(body.grammar, body.output_schema, body.constrained_field)
    jobs, choices = [], list[Choice]()
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        tokens = await service.encode(prompt) if isinstance(prompt, str) else prompt
        echo = (prompt if is_text else service.tokenizer.decode(tokens)) if body.echo else ""
        for index in range(body.n):
            parameters = body.parameters(service.tokenizer.stop_tokens, limit, body.stops, index)
            jobs.append(Job(tokens, parameters, constraint=constraint()))
            choices.append(CompletionChoice(service, body, str(echo)))
    head = {"id": new_id("cmpl"), "created": int(time.time()), "model": body.model}
    kinds = ("text_completion", "text_completion")
    return await Answer(service, body, jobs, choices, head, kinds).respond(request)


class CompletionChoice(Choice):
    """The text after a prompt.

    Parameters
    ----------
    echo : text that comes before all others
    """

    def __init__(self, service: Service, body: CompletionRequest, echo: str) -> None:
        self._stop_tokens = service.tokenizer.stop_tokens
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(service.names, body.logprobs)
        self._pieces: list[str] = []
        self._all_logprobs: dict[str, list[Any]] = {}
        self._echo = echo

    def push(self, output: RequestOutput) -> dict[str, Any] | None:
        text, self._echo = self._echo + output.text, ""
        self._pieces.append(text)
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
        fields: dict[str, Any] = {"text": text, "logprobs": None}
        if self._logprobs is not None:
            tokens = output.tokens
            if output.finish_reason is FinishReason.STOP and tokens[-1] in self._stop_tokens:
                tokens = tokens[:-1]
            lists = self._logprobs.push(tokens, output.logprobs[: len(tokens)])
            for name, values in lists.items():
                self._all_logprobs.setdefault(name, []).extend(values)
            fields["logprobs"] = lists
        return fields if text or self._logprobs is not None else None

    def whole(self) -> dict[str, Any]:
        has_logprobs = self._logprobs is not None
        return {
            "text": "".join(self._pieces),
            "logprobs": self._all_logprobs if has_logprobs else None,
        }
