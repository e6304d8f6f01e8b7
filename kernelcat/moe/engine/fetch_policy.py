"""Whether a prefix is fetched from host memory or computed anew: what is predicted to be faster."""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_TOKENS = 256
"""New tokens of a step whose time tells the speed of prefill: a smaller one is bound by weights."""
WEIGHT = 0.25
"""Part that a new step has in the mean of times."""


@dataclass
class FetchPolicy:
    """Compares seconds of a copy with seconds of prefill.

    Attributes
    ----------
    min_tokens : a fetch that saves fewer tokens is not worth its delay, at least one step
    bandwidth : bytes a second of a copy from host memory to pages
    seconds_per_token : of prefill, from the steps that have run; None before the first large one:
        then everything of ``min_tokens`` is fetched
    """

    min_tokens: int
    bandwidth: float
    seconds_per_token: float | None = None

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether copying ``num_bytes`` beats computing the keys and values of ``num_tokens``.

        ``num_bytes`` includes what earlier copies have left to do.
        """
        if num_tokens < self.min_tokens:
            return False
        if self.seconds_per_token is None:
            return True
        return num_bytes / self.bandwidth < num_tokens * self.seconds_per_token

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` new tokens has taken ``seconds``."""
        if num_tokens < MEASURED_TOKENS:
            return
        new, old = seconds / num_tokens, self.seconds_per_token
        self.seconds_per_token = new if old is None else old + WEIGHT * (new - old)
