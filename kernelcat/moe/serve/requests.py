"""Bodies of requests: what OpenAI's API names, as far as the engine has it.

Fields that no engine honours are refused by name and not ignored, so that nobody takes an answer
for something else. Fields without an effect on the answer are ignored: `user`, `metadata` and
others in `Sampling`. null is the same as a field that is left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.serve.bodies import Body
from kernelcat.moe.serve.errors import ApiError, unsupported
from kernelcat.moe.serve.messages import FunctionDefinition, Message, NamedTool, Tool

MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions writes without ``max_tokens``, as OpenAI's does."""


class StreamOptions(Body):
    """What a stream has beside the output.

    ``include_obfuscation`` is OpenAI's padding; this server has none.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """A schema with its name."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | bool = True
    strict: bool = False

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, content: Any) -> Any:
        if isinstance(content, dict) and "schema" in content:  # BaseModel has a method of that name
            content = {**content, "schema_": content["schema"]}
            del content["schema"]
        return content


class ResponseFormat(Body):
    """What the output must be: any text, a JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_output(self) -> dict[str, Any] | bool | None:
        """The JSON schema of the output; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise ApiError(400, "you must provide json_schema", param="response_format")
        return self.json_schema.schema_


class Sampling(Body):
    """Fields of both endpoints. Beyond OpenAI's: ``top_k``, ``min_p``, ``repetition_penalty``,
    ``ignore_eos`` (write on at the end of sequence), ``stop_token_ids``, ``grammar`` (Lark).
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    response_format: ResponseFormat | None = None
    grammar: str | None = None

    user: str = ""
    metadata: dict[str, str] = Field(default_factory=dict)
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives with log-probabilities at each token; None for none at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuses what the engine does not have.

        Raises
        ------
        ApiError
            A field has a value that cannot be honoured.
        """
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise unsupported(name, "use repetition_penalty")
        if self.logit_bias:
            raise unsupported("logit_bias", "use grammar or response_format")
        if not 1 <= self.n <= MAX_CHOICES:
            message = f"n={self.n} must be from 1 to {MAX_CHOICES}"
            raise ApiError(400, message, param="n")
        if self.stream_options is not None and not self.stream:
            message = "stream_options needs stream=true"
            raise ApiError(400, message, param="stream_options")
        if self.grammar is not None and self.output_schema is not None:
            message = "grammar and response_format exclude each other"
            raise ApiError(400, message, param="grammar")
        if self.ignore_eos and (self.grammar is not None or self.output_schema is not None):
            message = "ignore_eos excludes grammar and response_format, which end the output"
            raise ApiError(400, message, param="ignore_eos")

    @property
    def output_schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema of the output; None for any text."""
        return self.response_format.schema_of_output if self.response_format else None

    @property
    def constrained_field(self) -> str:
        """The field that constrains the output, if one does."""
        return "response_format" if self.grammar is None else "grammar"

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def parameters(
        self,
        stop_tokens: frozenset[int],
        max_tokens: int | None,
        stops: tuple[str, ...],
        choice: int = 0,
    ) -> SamplingParameters:
        """The engine's parameters for choice number ``choice`` of ``n``; each has its own seed.

        Raises
        ------
        InvalidArgument
            A value is out of range.
        """
        return SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None else _seed_of(self.seed, choice),
            max_tokens=max_tokens,
            stop=stops,
            stop_tokens=(frozenset() if self.ignore_eos else stop_tokens)
            | frozenset(self.stop_token_ids),
            logprobs=self.num_alternatives,
        )


def _seed_of(seed: int, choice: int) -> int:
    """The seed of a choice; the largest signed 64-bit integer is followed by the smallest."""
    top = 1 << 63
    return (seed + choice + top) % (2 * top) - top if choice else seed


class CompletionRequest(Sampling):
    """POST /v1/completions: ``prompt`` is text or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str = ""
    best_of: int | None = None

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise unsupported("suffix", "the models here only continue a prompt")
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", "use n")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", "there are no log-probabilities of prompts")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, text or token ids.

        Raises
        ------
        ApiError
            There is no prompt.
        """
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = [prompt] if is_one else list(prompt)
        if not prompts:
            raise ApiError(400, "prompt must not be empty", param="prompt")
        return prompts


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if self.forced_tool is not None:
            self.tool(self.forced_tool)
            if self.grammar is not None or self.output_schema is not None or self.ignore_eos:
                message = "tool_choice excludes grammar, response_format and ignore_eos"
                raise ApiError(400, message, param="tool_choice")

    def tool(self, name: str) -> FunctionDefinition:
        """The function called ``name``.

        Raises
        ------
        ApiError
            No tool has that name.
        """
        for tool in self.tools:
            if tool.function.name == name:
                return tool.function
        raise ApiError(400, f"no tool is called {name!r}", param="tool_choice")

    @property
    def offered_tools(self) -> list[FunctionDefinition]:
        """The functions that the model may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    @property
    def forced_tool(self) -> str | None:
        """The function that the model must call.

        Raises
        ------
        ApiError
            One of several functions is required: nothing here can force a model to choose.
        """
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        if self.tool_choice != "required":
            return None
        if len(self.tools) != 1:
            raise unsupported("tool_choice", "required needs exactly one tool; name the function")
        return self.tools[0].function.name

    @property
    def constrained_schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema of what is written: arguments of a function, or the output."""
        if name := self.forced_tool:
            return self.tool(name).parameters or {"type": "object"}
        return self.output_schema

    @property
    def token_limit(self) -> int | None:
        """Tokens to write at most; None for as many as the context has room for."""
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit
