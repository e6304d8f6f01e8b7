"""Sampling parameters of a request."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from kernelcat.errors import InvalidArgument

MAX_LOGPROBS = 20
"""Alternatives that a request may ask for at each token, as in OpenAI's API."""
MAX_STOPS = 16
"""Stop strings that a request may have."""
INT64 = 1 << 63


@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are chosen, and where a request ends. The entry `sample` defines the filters.

    Attributes
    ----------
    temperature : 0 for greedy decoding
    top_k : tokens that stay; 0 for all
    top_p : the most probable tokens stay until their probabilities sum up to ``top_p``; 1 for all
    min_p : tokens stay that have at least ``min_p`` times the largest probability; 0 for all
    repetition_penalty : divides positive logits of tokens that the request has, and multiplies
        negative ones; 1 for none
    seed : the draw of a token depends on the seed and on the token's position alone; None for a
        random seed
    max_tokens : tokens to write; None for as many as the context has room for
    stop : strings that end the request; neither they nor what follows them is returned
    stop_tokens : tokens that end the request, among them the model's end of sequence; their text is
        not returned
    logprobs : alternatives whose log-probabilities are returned with each token; None for no
        log-probabilities at all

    Raises
    ------
    InvalidArgument
        A value is out of range; the message names the value and the range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check("temperature", 0, inf)
        self._check_integer("top_k", 0, 2**31 - 1)
        self._check("top_p", 0, 1, is_open=True)
        self._check("min_p", 0, 1)
        self._check("repetition_penalty", 0, inf, is_open=True)
        self._check_integer("seed", -INT64, INT64 - 1)
        self._check_integer("max_tokens", 1, 2**31 - 1)
        self._check_integer("logprobs", 0, MAX_LOGPROBS)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidArgument(f"stop={self.stop!r} must be strings that are not empty")
        if len(self.stop) > MAX_STOPS:
            raise InvalidArgument(f"stop has {len(self.stop)} strings, and may have {MAX_STOPS}")

    def _check(self, name: str, low: float, high: float, is_open: bool = False) -> None:
        """Refuses a value outside of ``low`` to ``high``, or ``low`` itself where ``is_open``."""
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not isfinite(value)
            or not low <= value <= high
            or (is_open and value == low)
        ):
            bound = f"greater than {low}" if is_open else f"at least {low}"
            limit = f" and at most {high}" if isfinite(high) else ""
            raise InvalidArgument(f"{name}={value!r} must be a number {bound}{limit}")

    def _check_integer(self, name: str, low: int, high: int) -> None:
        """Refuses what is neither None (where that is the default) nor in ``low`` to ``high``."""
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidArgument(f"{name}={value!r} must be an integer from {low} to {high}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature == 0

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on which tokens the request has."""
        return self.repetition_penalty != 1

    @property
    def has_filters(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0
