"""gpt-oss's chat format, harmony: channels for reasoning, tool calls and the answer.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>          reasoning
    <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>          the answer

Source: OpenAI, "OpenAI harmony response format", 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyError,
    ReasoningEffort,
    Role,
    StreamableParser,
    SystemContent,
    ToolDescription,
)
from openai_harmony import Message as HarmonyMessage

from kernelcat.moe.engine.text import Detokenizer, StopStrings
from kernelcat.moe.serve.chat_format import (
    ChatFormat,
    ChatParser,
    ChatPrompt,
    Delta,
    ToolCallDelta,
)
from kernelcat.moe.serve.errors import ApiError
from kernelcat.moe.serve.messages import Message
from kernelcat.moe.serve.requests import ChatRequest
from kernelcat.moe.tokenizer import HarmonyTokenizer

FUNCTIONS = "functions."
"""Namespace of the functions that a request offers."""
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"


class HarmonyFormat(ChatFormat):
    """Messages in harmony.

    A function that must be called, and a schema of the answer, are written as the beginning of the
    answer: the model then writes the arguments, or the answer without reasoning.
    """

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self.tokenizer, self.encoding = tokenizer, tokenizer.encoding

    @property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset(self.encoding.stop_tokens_for_assistant_actions())

    def prompt(self, request: ChatRequest) -> ChatPrompt:
        conversation = Conversation.from_messages(list(_messages(request)))
        tokens = self.encoding.render_conversation_for_completion(conversation, Role.ASSISTANT)
        return ChatPrompt(tokens + self._beginning(request), (), is_text=False)

    def parser(self, request: ChatRequest) -> ChatParser:
        return HarmonyParser(self, request.stops, self._beginning(request))

    def _beginning(self, request: ChatRequest) -> list[int]:
        """Tokens with which the answer begins."""
        if name := request.forced_tool:
            text = f" to={FUNCTIONS}{name}<|channel|>{COMMENTARY} <|constrain|>json<|message|>"
        elif request.output_schema is not None or request.grammar is not None:
            text = f"<|channel|>{FINAL}<|message|>"
        else:
            return []
        return self.encoding.encode(text, allowed_special="all")


class HarmonyParser(ChatParser):
    """An answer in harmony.

    Text that is no message of harmony is content as it is, so that a reader sees what the model
    wrote.

    Parameters
    ----------
    format : the format
    stops : strings that end the content
    beginning : tokens of the answer that are part of the prompt
    """

    def __init__(
        self, format: HarmonyFormat, stops: Sequence[str], beginning: Sequence[int]
    ) -> None:
        self._format = format
        self._parser = StreamableParser(format.encoding, Role.ASSISTANT, strict=False)
        self._stops = StopStrings(stops)
        self._plain = Detokenizer(format.tokenizer.decode)
        self._is_harmony = True
        self._is_call = False
        self._num_calls = 0
        for token in beginning:
            self._parser.process(token)

    @property
    def has_tool_calls(self) -> bool:  # type: ignore[override]
        return self._num_calls > 0

    @property
    def is_stopped(self) -> bool:  # type: ignore[override]
        return self._stops.is_stopped

    def push(self, tokens: Sequence[int], text: str, is_end: bool) -> Delta:
        delta = Delta()
        for token in tokens:
            if is_end and token in self._format.stop_tokens:
                break
            if self._is_harmony:
                self._process(token, delta)
            else:
                self._add_content(delta, self._plain.push(token))
        if is_end:
            self._add_content(delta, self._plain.finish())
            delta.content += self._stops.finish()
        return delta

    def _process(self, token: int, delta: Delta) -> None:
        """Adds what ``token`` means to ``delta``."""
        parser = self._parser
        try:
            parser.process(token)
        except HarmonyError:
            self._is_harmony = False
            return self._add_content(delta, self._plain.push(token))
        piece, channel = parser.last_content_delta or "", parser.current_channel
        recipient = parser.current_recipient or ""
        if recipient.startswith(FUNCTIONS):
            self._add_call(delta, recipient.removeprefix(FUNCTIONS), piece)
        else:
            self._is_call = False
            if channel == ANALYSIS:
                self.num_reasoning += bool(piece)
                delta.reasoning += piece
            elif piece:
                self._add_content(delta, piece)

    def _add_content(self, delta: Delta, piece: str) -> None:
        delta.content += self._stops.push(piece)

    def _add_call(self, delta: Delta, name: str, piece: str) -> None:
        """Adds a piece of a call; the first token of a call's message has no content."""
        if not self._is_call:
            self._is_call = True
            self._num_calls += 1
            delta.tool_calls.append(ToolCallDelta(self._num_calls - 1, piece, name))
        elif piece:
            delta.tool_calls.append(ToolCallDelta(self._num_calls - 1, piece))


def _messages(request: ChatRequest) -> Iterator[HarmonyMessage]:
    """The conversation: system and developer messages first, then all others in their order."""
    system = SystemContent.new().with_conversation_start_date(date.today().isoformat())
    if request.reasoning_effort is not None:
        effort = request.reasoning_effort.capitalize()
        if effort not in {level.value for level in ReasoningEffort}:
            message = f"reasoning_effort={request.reasoning_effort!r} must be low, medium or high"
            raise ApiError(400, message, param="reasoning_effort")
        system = system.with_reasoning_effort(ReasoningEffort(effort))
    yield HarmonyMessage.from_role_and_content(Role.SYSTEM, system)
    instructions = [m.text for m in request.messages if m.role in ("system", "developer")]
    schema = request.output_schema
    if schema is not None:
        instructions.append(f"# Response Formats\n\n## answer\n\n{json.dumps(schema)}")
    if instructions or request.offered_tools:
        developer = DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions("\n\n".join(instructions))
        if request.offered_tools:
            developer = developer.with_function_tools(
                [
                    ToolDescription.new(tool.name, tool.description, tool.parameters or None)
                    for tool in request.offered_tools
                ]
            )
        yield HarmonyMessage.from_role_and_content(Role.DEVELOPER, developer)
    names = {
        call.id: call.function.name for message in request.messages for call in message.tool_calls
    }
    for sent in request.messages:
        if sent.role == "user":
            yield HarmonyMessage.from_role_and_content(Role.USER, sent.text)
        elif sent.role == "tool":
            yield _tool_result(sent, names)
        elif sent.role == "assistant":
            yield from _answer(sent)


def _answer(message: Message) -> Iterator[HarmonyMessage]:
    """An assistant's message: reasoning, calls, and text."""

    def on(channel: str, text: str) -> HarmonyMessage:
        return HarmonyMessage.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)

    if message.reasoning:
        yield on(ANALYSIS, message.reasoning)
    if message.text:
        yield on(COMMENTARY if message.tool_calls else FINAL, message.text)
    for call in message.tool_calls:
        yield (
            on(COMMENTARY, call.function.arguments)
            .with_recipient(f"{FUNCTIONS}{call.function.name}")
            .with_content_type("<|constrain|>json")
        )


def _tool_result(message: Message, names: dict[str, str]) -> HarmonyMessage:
    """What a tool returned."""
    name = names.get(message.tool_call_id) or message.name
    if not name:
        raise ApiError(
            400,
            f"tool_call_id={message.tool_call_id!r} is the id of no tool call in messages",
            param="messages",
        )
    author = Author.new(Role.TOOL, f"{FUNCTIONS}{name}")
    result = HarmonyMessage.from_author_and_content(author, message.text)
    return result.with_recipient("assistant").with_channel(COMMENTARY)
