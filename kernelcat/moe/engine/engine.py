"""The engine: runs a model over the steps that the scheduler plans.

    >>> engine = Engine(moe.load("gpt-oss-20b"), tokenizer=tokenizer)
    >>> engine.submit(tokenizer.encode("Hello"), SamplingParameters(max_tokens=20))
    >>> while engine.has_work:
    ...     for output in engine.step():
    ...         print(output.text, end="")

`submit`, `cancel`, `statistics` and `check_integrity` may be called from any thread while one
thread runs `step`. `AsyncEngine` owns such a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.constraint import Constraint
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason, Request
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.model import Decoder


class EngineError(KernelcatError):
    """The engine cannot run any more: the device is lost, or the engine is closed."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one position, of the model's distribution before temperature, penalty
    and filters.

    Attributes
    ----------
    logprob : of the token that was chosen
    top : the most probable tokens with their log-probabilities, the most probable first; as many as
        `SamplingParameters.logprobs`
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RequestOutput:
    """What a step adds to a request.

    Attributes
    ----------
    request_id : the request's id
    tokens : new tokens, a stop token included
    text : text that became final; "" for requests without text
    logprobs : one for each new token; empty where the request asks for none
    finish_reason : why the request has ended, or None
    num_cached : tokens of the prompt that were found in the prefix cache
    error : what went wrong, where ``finish_reason`` is ERROR
    """

    request_id: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    error: str = ""


@dataclass(frozen=True)
class Statistics:
    """Numbers of an engine; those called ``*_total`` only grow.

    Attributes
    ----------
    requests_waiting, requests_running : requests that have not ended
    pages, pages_in_use, pages_cached : of all layer groups; a cached page holds a block that only
        the prefix cache knows
    steps_total : steps that have ended, failed ones included
    failed_steps_total : steps that failed
    requests_total : requests that were accepted
    preemptions_total : requests that lost their pages
    prompt_tokens_total : tokens of prompts that ran
    cached_tokens_total : those of them that were found in the prefix cache
    output_tokens_total : tokens that were written
    draft_tokens_total, accepted_tokens_total : tokens that speculation proposed, those that were
        right
    """

    requests_waiting: int
    requests_running: int
    pages: int
    pages_in_use: int
    pages_cached: int
    steps_total: int
    failed_steps_total: int
    requests_total: int
    preemptions_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    draft_tokens_total: int
    accepted_tokens_total: int


class Engine:
    """A model with caches, a scheduler and sampling.

    Parameters
    ----------
    model : on ``cuda``, or on ``cpu`` for tests and small models
    settings : limits, memory, speculation, graphs
    decode : the text of token ids (`Tokenizer.decode`); None where nobody needs text

    Attributes
    ----------
    limits : of requests, as far as the model and the caches allow them

    Raises
    ------
    InvalidArgument
        The memory is too small for the weights and one request, or a setting is not possible.
    """

    limits: Limits

    def __init__(
        self,
        model: Decoder,
        settings: EngineSettings | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        raise NotImplementedError

    def submit(
        self,
        prompt: Sequence[int],
        parameters: SamplingParameters | None = None,
        *,
        request_id: str | None = None,
        needs_text: bool = True,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> Request:
        """Adds a request that waits. Any thread may call it.

        Parameters
        ----------
        prompt : token ids
        request_id : unique among requests that have not ended; None for a new one
        needs_text : whether the engine turns tokens into text; stop strings need text
        constraint : which tokens may come next; None for all
        salt : requests with different salts share no page of the prefix cache

        Raises
        ------
        QueueFull
            Too many requests wait.
        InvalidArgument
            The request does not fit into the limits, or needs text without a tokenizer.
        EngineError
            The engine is closed, or its device is lost.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """Ends a request in any state and frees its pages; False if there is no such request.

        No output follows. Any thread may call it.
        """
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step has no result yet."""
        raise NotImplementedError

    @property
    def is_healthy(self) -> bool:
        """Whether steps can run."""
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """Plans and launches a step, waits for the oldest one in flight, returns what is new.

        A step that fails ends its requests with an output of finish reason ERROR; all others go
        on. If the device is lost, all requests end so.
        """
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Proves that pages, queues and requests agree, else raises IntegrityError."""
        raise NotImplementedError

    def statistics(self) -> Statistics:
        """Numbers at this moment."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends all requests and frees caches and graphs. The model stays."""
        raise NotImplementedError
