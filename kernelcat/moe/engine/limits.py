"""Limits of an engine, and the errors of requests that exceed them."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.request import Request

MAX_IN_FLIGHT = 2
"""Steps that are planned and have no result yet, at most: one runs while one is prepared."""


class QueueFull(KernelcatError):
    """More requests wait than the engine accepts; the client may try again later."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine.

    Attributes
    ----------
    step_tokens : new tokens that a step computes, at most
    max_running : requests that a step computes, at most
    max_waiting : requests that wait, at most
    context : tokens of a request, prompt included, at most
    max_chunk : new tokens of one request in a step, at most; 0 for ``step_tokens``
    vocab_size : ids of tokens are less; 0 for unknown

    Raises
    ------
    InvalidArgument
        A limit is not positive, or ``step_tokens`` is less than ``max_running``: then a step could
        not give each running request a token.
    """

    step_tokens: int = 2048
    max_running: int = 256
    max_waiting: int = 1024
    context: int = 8192
    max_chunk: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if min(self.max_running, self.max_waiting, self.max_chunk + 1, self.context - 1) < 1:
            raise InvalidArgument(f"{self}: limits must be positive, and context at least 2")
        if self.step_tokens < self.max_running:
            raise InvalidArgument(
                f"step_tokens={self.step_tokens} must be at least max_running={self.max_running}: "
                "a step gives each running request a token"
            )

    @property
    def chunk(self) -> int:
        """New tokens of one request in a step, at most."""
        return min(self.max_chunk or self.step_tokens, self.step_tokens)

    @property
    def span(self) -> int:
        """New tokens of one request in all steps in flight, at most."""
        return MAX_IN_FLIGHT * self.chunk

    def check_cache(self, manager: BlockManager) -> None:
        """Refuses a cache in which a single request could not run.

        Raises
        ------
        InvalidArgument
            A group with a window has too few pages for the chunks that are in flight.
        """
        for group in manager.groups:
            usable = group.num_pages - 1
            needed = min(manager.max_pages(group, self.span), manager.blocks_of(self.context))
            if group.window and usable < needed:
                raise InvalidArgument(
                    f"group {group.name} has {usable} pages for requests, and {MAX_IN_FLIGHT} "
                    f"chunks of {self.chunk} tokens with a window of {group.window} need {needed}: "
                    "give the group more pages, or lower max_chunk"
                )

    def max_length(self, request: Request, manager: BlockManager) -> int:
        """Tokens at which ``request`` ends; with all pages, the request can reach the number.

        Raises
        ------
        InvalidArgument
            The prompt is empty or has an id outside of the vocabulary, or prompt and ``max_tokens``
            do not fit into the context or the cache.
        """
        prompt, max_tokens = request.prompt, request.parameters.max_tokens
        if not prompt:
            raise InvalidArgument("the prompt has no token; it must have at least one")
        if min(prompt) < 0 or (self.vocab_size and max(prompt) >= self.vocab_size):
            raise InvalidArgument(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}; "
                f"they must be from 0 to {self.vocab_size - 1 if self.vocab_size else 'the last'}"
            )
        # the last token that is chosen needs no slot
        room = {"context": self.context, "cache": manager.max_tokens + 1}
        name, limit = min(room.items(), key=lambda item: item[1])
        length = len(prompt) + (max_tokens or 1)
        if length > limit:
            wanted = f" and max_tokens={max_tokens}" if max_tokens else " and one token to write"
            raise InvalidArgument(
                f"a prompt of {len(prompt)} tokens{wanted} are {length} tokens, and the {name} "
                f"has room for {limit}: shorten the prompt or lower max_tokens"
            )
        return length if max_tokens else limit
