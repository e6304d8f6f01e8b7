"""A step of the engine: the new tokens that one run of the model computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernelcat.moe.engine.request import FinishReason, Request


@dataclass(slots=True)
class ScheduledChunk:
    """New tokens of one request: a chunk of its prompt, its last token, or that and a draft.

    Their keys and values go to positions ``start`` to ``end - 1`` of the request's block table.

    Attributes
    ----------
    request : the request
    start : position of the first new token
    tokens : ids of the new tokens, drafts included
    drafts : the last new tokens that nobody has chosen yet
    num_rows : how many of the last new tokens a token is chosen after: 0 for a chunk that does not
        end the request's tokens, else 1 and one for each draft
    first_row : number of the first of these rows in the step
    source_row : -1, or the row of the step before that chooses the (only) new token; ``tokens`` is
        then [0]
    num_preemptions : the request's, when the step was planned
    """

    request: Request
    start: int
    tokens: list[int]
    drafts: list[int]
    num_rows: int
    first_row: int
    source_row: int
    num_preemptions: int

    @property
    def end(self) -> int:
        """Position after the last new token: the tokens that queries attend to."""
        return self.start + len(self.tokens)


@dataclass(slots=True)
class Step:
    """What one run of the model computes.

    A step may have no row: chunks of prompts that end none. Such a step runs all the same, because
    later steps need its keys and values.

    Attributes
    ----------
    index : number of the step
    chunks : new tokens of requests, at least one
    preempted : requests that lost their pages to older ones when the step was planned
    planned_at : seconds of the scheduler's clock, with host memory
    """

    index: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0
    planned_at: float = 0.0

    @property
    def max_q(self) -> int:
        """The most new tokens of a request."""
        return max((len(chunk.tokens) for chunk in self.chunks), default=0)

    def add(self, chunk: ScheduledChunk) -> None:
        """Appends a chunk."""
        self.chunks.append(chunk)
        self.num_tokens += len(chunk.tokens)
        self.num_rows += chunk.num_rows


@dataclass(slots=True)
class Output:
    """What a step adds to a request.

    Attributes
    ----------
    request : the request
    tokens : new tokens, a stop token included
    text : text that became final; "" for requests without text
    logprobs : for each new token what the caller of `Scheduler.update` passed for its row
    finish_reason : why the request has ended, or None
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: FinishReason | None = None
