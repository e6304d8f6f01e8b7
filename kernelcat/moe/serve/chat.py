"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from kernelcat.moe.engine.async_engine import RequestOutput
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.serve import logprobs
from kernelcat.moe.serve.answers import Answer, Choice
from kernelcat.moe.serve.calls import Job
from kernelcat.moe.serve.chat_format import ChatParser, Delta
from kernelcat.moe.serve.errors import unsupported
from kernelcat.moe.serve.requests import ChatRequest
from kernelcat.moe.serve.service import Service, new_id


async def chat(service: Service, request: Request, content: bytes) -> ASGIApp:
    """Answers a chat; see `Answer.respond` for errors."""
    body = ChatRequest.parse(content)
    service.check_model(body.model)
    body.check()
    form = service.chat_format
    if form is None:
        raise unsupported("chat", "this model has no chat template; use /v1/completions")
    prompt = await asyncio.to_thread(form.prompt, body)
    param = "tools" if body.forced_tool else body.constrained_field
    constraint = await service.constraints(body.grammar, body.constrained_schema, param)
    jobs = [
        Job(
            prompt.tokens,
            body.parameters(form.stop_tokens, body.token_limit, prompt.stops, index),
            prompt.is_text,
            constraint(),
        )
        for index in range(body.n)
    ]
    choices: list[Choice] = [ChatChoice(service, body, form.parser(body)) for _ in jobs]
    head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": body.model}
    kinds = ("chat.completion", "chat.completion.chunk")
    return await Answer(service, body, jobs, choices, head, kinds).respond(request)


class ChatChoice(Choice):
    """An assistant's message."""

    def __init__(self, service: Service, body: ChatRequest, parser: ChatParser) -> None:
        self._service, self._parser = service, parser
        self._num_alternatives = body.num_alternatives
        self._stop_tokens = service.chat_format.stop_tokens if service.chat_format else frozenset()
        self._is_begun = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def push(self, output: RequestOutput) -> dict[str, Any] | None:
        parser, is_end = self._parser, output.finish_reason is not None
        delta = parser.push(output.tokens, output.text, is_end)
        self.num_reasoning = parser.num_reasoning
        self.is_stopped = parser.is_stopped
        if is_end or self.is_stopped:
            self.finish_reason = self._reason(output)
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        entries = self._entries(output)
        if not (delta or entries or self.finish_reason):
            return None
        fields: dict[str, Any] = {"delta": self._fields(delta)}
        if self._num_alternatives is not None:
            self._logprobs += entries
            fields["logprobs"] = {"content": entries}
        return fields

    def _reason(self, output: RequestOutput) -> str:
        if self._parser.has_tool_calls and output.finish_reason is not FinishReason.LENGTH:
            return "tool_calls"
        return "stop" if self.is_stopped else str(output.finish_reason)

    def _entries(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Log-probabilities of the new tokens, without a token that ends the answer."""
        if self._num_alternatives is None:
            return []
        tokens = output.tokens
        if output.finish_reason is FinishReason.STOP and tokens[-1] in self._stop_tokens:
            tokens = tokens[:-1]
        found = output.logprobs[: len(tokens)]
        return logprobs.of_chat(self._service.names, tokens, found, self._num_alternatives)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """The delta as the API names its parts; the first one names the role."""
        fields: dict[str, Any] = {}
        if not self._is_begun:
            self._is_begun = True
            fields = {"role": "assistant", "content": ""}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning"] = delta.reasoning
        if delta.tool_calls:
            fields["tool_calls"] = [
                self._call_fields(call.index, call.name, call.arguments)
                for call in delta.tool_calls
            ]
        return fields

    def _call_fields(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        """A piece of a tool call; the first piece names the function."""
        if name is None:
            self._calls[index]["function"]["arguments"] += arguments
            return {"index": index, "function": {"arguments": arguments}}
        function = {"name": name, "arguments": arguments}
        call = {"id": new_id("call"), "type": "function", "function": function}
        self._calls.append({**call, "function": dict(function)})
        return {"index": index, **call}

    def whole(self) -> dict[str, Any]:
        text = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        if reasoning := "".join(self._reasoning):
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        has_logprobs = self._num_alternatives is not None
        return {
            "message": message,
            "logprobs": {"content": self._logprobs} if has_logprobs else None,
        }
