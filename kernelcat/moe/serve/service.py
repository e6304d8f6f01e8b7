"""What the endpoints share: engine, tokenizer, settings, metrics, and the calls that run."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.served_engine import ServedEngine
from kernelcat.moe.serve import errors
from kernelcat.moe.serve.calls import Calls, Job
from kernelcat.moe.serve.chat_format import chat_format
from kernelcat.moe.serve.errors import ApiError
from kernelcat.moe.serve.grammars import Grammar, Grammars, grammars_of
from kernelcat.moe.serve.logprobs import TokenNames
from kernelcat.moe.serve.metrics import Metrics
from kernelcat.moe.serve.settings import Settings
from kernelcat.moe.tokenizer import Tokenizer

LONG_TEXT = 4096
"""Characters from which on a text is encoded in a thread, so that streams go on."""


class Service:
    """A model behind an API.

    Attributes
    ----------
    created : seconds since 1970
    is_draining : whether new requests are refused because the server ends
    """

    def __init__(self, engine: ServedEngine, tokenizer: Tokenizer, settings: Settings) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.chat_format = chat_format(tokenizer)
        self.names = TokenNames(tokenizer)
        self.metrics = Metrics(engine.metrics)
        self.calls = Calls(engine, self.metrics)
        self.created = int(time.time())
        self.is_draining = False
        self._lock = threading.Lock()
        self._made_grammars: Grammars | None = None

    def check_model(self, name: str) -> None:
        """Refuses requests to another model."""
        if name != self.settings.model:
            message = f"the model {name!r} does not exist; this server has {self.settings.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def encode(self, text: str) -> list[int]:
        """The tokens of ``text``."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def constraints(
        self, lark: str | None, schema: dict[str, Any] | bool | None, param: str
    ) -> Callable[[], Grammar | None]:
        """What makes the constraint of a choice: a grammar, a JSON schema, or none.

        Raises
        ------
        ApiError
            The grammar or the schema, which came in field ``param``, is not valid, or the model
            cannot have one.
        """
        if lark is None and schema is None:
            return lambda: None

        def compiled() -> Grammar:
            grammars = self._grammars()
            return grammars.lark(lark) if lark is not None else grammars.json(schema)

        try:
            return (await asyncio.to_thread(compiled)).copy
        except InvalidArgument as error:
            raise ApiError(400, str(error), param=param) from error

    def _grammars(self) -> Grammars:
        """Made for the first request with a grammar: large vocabularies take seconds."""
        with self._lock:
            if self._made_grammars is None:
                vocab_size = self.engine.limits.vocab_size
                self._made_grammars = grammars_of(self.tokenizer, vocab_size)
            return self._made_grammars

    def drain(self) -> None:
        """Refuses new requests; those that run have the grace time.

        Call it in the event loop's thread.
        """
        self.is_draining = True
        asyncio.get_running_loop().call_later(self.settings.grace, self.abort)

    def abort(self) -> None:
        """Answers all requests that run with an error."""
        self.calls.fail(errors.shutting_down)


def new_id(prefix: str) -> str:
    """A name that nothing else has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(jobs: Sequence[Job], num_reasoning: int | None = None) -> dict[str, Any]:
    """``usage``: choices of one prompt count the prompt once."""
    prompts = {id(job.prompt): job for job in jobs}.values()
    num_prompt = sum(len(job.prompt) for job in prompts)
    num_output = sum(job.num_tokens for job in jobs)
    content: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(job.num_cached for job in prompts)},
    }
    if num_reasoning is not None:
        content["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return content
