"""Where the prompt of a request is computed."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcat.errors import InvalidArgument


@dataclass(frozen=True)
class Router:
    """Chooses by the tokens that must be computed, and by who has work.

    Attributes
    ----------
    short : prompts with at most so many tokens to compute stay with the decode engine: a step of
        decoding with so few more tokens takes hardly longer, and no page has to move

    Raises
    ------
    InvalidArgument
        ``short`` is negative.
    """

    short: int = 64

    def __post_init__(self) -> None:
        if self.short < 0:
            raise InvalidArgument(f"short={self.short} must not be negative")

    def is_local(self, num_new: int, num_queued: int, num_writing: int) -> bool:
        """Whether the decode engine computes a prompt itself.

        Parameters
        ----------
        num_new : tokens of the prompt that its prefix cache lacks
        num_queued : tokens of prompts that wait for the prefill engine, or that it computes
        num_writing : requests that the decode engine runs, or that will come to it
        """
        return num_new <= self.short or (num_writing == 0 and num_queued > num_new)
