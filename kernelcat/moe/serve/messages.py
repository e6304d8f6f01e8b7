"""Messages of a chat, and the tools that a model may call."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kernelcat.moe.serve.bodies import Body


class FunctionCall(Body):
    """A call that a message has: JSON in ``arguments``."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call of a tool in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0
    function: FunctionCall


class TextPart(Body):
    """A part of a message. Images, sound and files are refused."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat; ``reasoning`` is an assistant's chain of thought."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str = ""
    reasoning: str = ""
    refusal: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class FunctionDefinition(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction
