"""A request: tokens that are known, tokens that are in the cache, and how the request ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from kernelcat.moe.engine.blocks import BlockTable
from kernelcat.moe.engine.constraint import Constraint
from kernelcat.moe.engine.pages_out import Destination
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.speculation import NgramIndex
from kernelcat.moe.engine.text import TextStream


def describe(error: Exception) -> str:
    """The class and the message of an exception."""
    return f"{type(error).__name__}: {error}"


class State(Enum):
    """Where a request is."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended; the values of OpenAI's API, and two more."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """A prompt, sampling parameters, and what the scheduler knows about them.

    Attributes
    ----------
    id : name, unique among requests that have not ended
    prompt : token ids
    parameters : how tokens are chosen
    text : turns tokens into text and finds stop strings; None where nobody needs text
    salt : requests with different salts share no page
    is_constrained : whether the choice of a token needs all tokens before it on the host (a
        grammar), so that a step can be planned only when the step before it has ended
    constraint : the grammar; None for any text
    destination : where another engine wants the prompt's pages; None for nowhere

    tokens : known tokens: the prompt and what was written
    max_length : tokens at which the request ends
    seed : of the draws
    num_computed : tokens whose keys and values are in the cache, or are written by a step in flight
    num_pending : tokens that steps in flight choose; speculation may reject some
    pending_row : row of the last step in flight that chooses the token after ``tokens``
    num_preemptions : how often the request lost its pages
    num_cached : tokens of the prompt that were found in the cache when the request first ran
    num_sent : leading blocks of the prompt that steps have sent to ``destination``
    error : what went wrong with this request alone, "" for nothing
    order : place in the order of arrival
    arrived_at, first_token_at, ended_at : seconds of the scheduler's clock
    """

    id: str
    prompt: Sequence[int]
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    text: TextStream | None = None
    salt: str = ""
    is_constrained: bool = False
    constraint: Constraint | None = None
    destination: Destination | None = None

    tokens: list[int] = field(init=False)
    state: State = field(init=False, default=State.NEW)
    finish_reason: FinishReason | None = field(init=False, default=None)
    max_length: int = field(init=False, default=0)
    seed: int = field(init=False)
    hashes: list[bytes] = field(init=False, default_factory=list)
    table: BlockTable | None = field(init=False, default=None)
    ngrams: NgramIndex | None = field(init=False, default=None)
    num_computed: int = field(init=False, default=0)
    num_pending: int = field(init=False, default=0)
    pending_row: int = field(init=False, default=-1)
    num_preemptions: int = field(init=False, default=0)
    num_cached: int | None = field(init=False, default=None)
    num_sent: int = field(init=False, default=0)
    error: str = field(init=False, default="")
    order: int = field(init=False, default=-1)
    arrived_at: float = field(init=False, default=0.0)
    first_token_at: float | None = field(init=False, default=None)
    ended_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        seed = self.parameters.seed
        self.seed = random.getrandbits(63) if seed is None else seed

    @property
    def num_written(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last one are in the cache."""
        return self.num_computed + 1 >= len(self.tokens)

    def append(self, token: int) -> str:
        """Adds a token that was chosen, sets ``finish_reason`` if the request ends with the token.

        Returns the text that became final, "" without ``text``.
        """
        self.tokens.append(token)
        if self.ngrams is not None:
            self.ngrams.append(token)
        piece = ""
        if token in self.parameters.stop_tokens:
            self.finish_reason = FinishReason.STOP
        elif self.text is not None:
            piece = self.text.push(token)
            if self.text.is_stopped:
                self.finish_reason = FinishReason.STOP
        if self.finish_reason is None and len(self.tokens) >= self.max_length:
            self.finish_reason = FinishReason.LENGTH
        if self.constraint is not None:
            try:
                self.constraint.append(token)
            except Exception as error:  # other people's code: the request ends, and no other
                self.error, self.finish_reason = describe(error), FinishReason.ERROR
        if self.finish_reason is not None and self.text is not None:
            piece += self.text.finish()
        return piece

    @property
    def ttft(self) -> float | None:
        """Seconds from the arrival to the first token; None before it."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first: (end - first) / (tokens - 1).

        None before the end, and for requests with fewer than two tokens.
        """
        if self.first_token_at is None or self.ended_at is None or self.num_written < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.num_written - 1)
