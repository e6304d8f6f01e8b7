"""Chat formats: messages to a prompt, and tokens back to the parts of an answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kernelcat.moe.serve.errors import ApiError, unsupported
from kernelcat.moe.serve.messages import Message
from kernelcat.moe.serve.requests import ChatRequest
from kernelcat.moe.tokenizer import HarmonyTokenizer, Tokenizer


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of a tool call: ``name`` with the call's first piece, then pieces of arguments."""

    index: int
    arguments: str
    name: str | None = None


@dataclass(slots=True)
class Delta:
    """What some tokens add to an answer.

    Attributes
    ----------
    content : text for the reader
    reasoning : the model's chain of thought
    tool_calls : pieces of tool calls
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class ChatParser(ABC):
    """Tokens of one answer in, parts of the answer out.

    Attributes
    ----------
    is_stopped : whether a stop string has ended the answer, so that no further token is needed
    num_reasoning : tokens of the chain of thought
    has_tool_calls : whether the answer calls a tool
    """

    is_stopped = False
    num_reasoning = 0
    has_tool_calls = False

    @abstractmethod
    def push(self, tokens: Sequence[int], text: str, is_end: bool) -> Delta:
        """What is final since ``tokens`` are known.

        Parameters
        ----------
        tokens : new tokens
        text : the text that the engine's `TextStream` returned for ``tokens``
        is_end : whether no token follows
        """


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt, the strings that the engine stops at, and the parser of an answer.

    ``is_text`` : whether the parser takes the engine's text
    """

    tokens: list[int]
    stops: tuple[str, ...]
    is_text: bool


class ChatFormat(ABC):
    """How a model writes chats."""

    @abstractmethod
    def prompt(self, request: ChatRequest) -> ChatPrompt:
        """The prompt for the answer to ``request``.

        Raises
        ------
        ApiError
            The format cannot express the messages or tools.
        """

    @abstractmethod
    def parser(self, request: ChatRequest) -> ChatParser:
        """The parser of one answer to ``request``."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.tokenizer.stop_tokens

    tokenizer: Tokenizer


class TextParser(ChatParser):
    """All text is content."""

    def push(self, tokens: Sequence[int], text: str, is_end: bool) -> Delta:
        return Delta(text)


class TemplateFormat(ChatFormat):
    """A Jinja template, as `tokenizer_config.json` has it; answers are plain text.

    The template runs in Jinja's sandbox: a checkpoint is data.

    Raises
    ------
    ApiError
        The template is not valid.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(tokenizer.chat_template)
        except jinja2.TemplateError as error:
            raise ApiError(500, f"the model's chat template is not valid: {error}") from error

    def prompt(self, request: ChatRequest) -> ChatPrompt:
        if request.offered_tools or request.forced_tool:
            raise unsupported("tools", "this model's chat format has no tool calls")
        names = dict(request.chat_template_kwargs)
        if request.reasoning_effort is not None:
            names["reasoning_effort"] = request.reasoning_effort
        try:
            text = self._template.render(
                **{
                    **names,
                    **self.tokenizer.special_names,
                    "messages": [_plain(message) for message in request.messages],
                    "add_generation_prompt": True,
                }
            )
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses the messages: {error}"
            raise ApiError(400, message, param="messages") from error
        tokens = self.tokenizer.encode(text, adds_special_tokens=False)
        return ChatPrompt(tokens, request.stops, is_text=True)

    def parser(self, request: ChatRequest) -> ChatParser:
        return TextParser()


def chat_format(tokenizer: Tokenizer) -> ChatFormat | None:
    """The format of chats of a model with ``tokenizer``; None if the model has none."""
    if isinstance(tokenizer, HarmonyTokenizer):
        from kernelcat.moe.serve.harmony import HarmonyFormat

        return HarmonyFormat(tokenizer)
    return TemplateFormat(tokenizer) if tokenizer.chat_template else None


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates take it."""
    if message.tool_calls or message.role == "tool":
        raise unsupported("messages", "this model's chat format has no tool calls")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text}


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
