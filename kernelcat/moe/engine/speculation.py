"""Speculative decoding without a second model: drafts from the request's own tokens.

A step that verifies k draft tokens computes k + 1 rows of logits: row i is what plain decoding
would compute if the first i draft tokens were right. A draw depends on the seed and the position
alone, so row i also yields the very token that plain decoding would draw. Draft tokens are accepted
as long as they equal these tokens; the row after the last accepted one yields one token more.
Speculation therefore changes the number of steps and never the tokens, greedy or sampled.

Drafts from n-grams: Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelcat.errors import InvalidArgument

MAX_CANDIDATES = 64
"""Earlier places that a proposal compares, the latest ones first."""


@dataclass(frozen=True)
class Speculation:
    """How drafts are made.

    Attributes
    ----------
    num_drafts : draft tokens a step, at most
    min_match : tokens at the end of a request that must also be found earlier
    max_match : tokens after which a longer match is not looked for

    Raises
    ------
    InvalidArgument
        A number is less than 1, or ``max_match`` is less than ``min_match``.
    """

    num_drafts: int = 4
    min_match: int = 2
    max_match: int = 8

    def __post_init__(self) -> None:
        if self.num_drafts < 1 or not 1 <= self.min_match <= self.max_match:
            raise InvalidArgument(f"{self}: numbers must be positive, min_match <= max_match")


class NgramIndex:
    """The places of all n-grams of a request, kept up to date as tokens come.

    The n-grams have ``min_match`` tokens. Each place links to the place before it with the same
    n-gram, as in LZ77's hash chains, so that a token costs one dictionary entry at most.
    """

    def __init__(self, speculation: Speculation, tokens: Iterable[int] = ()) -> None:
        self._min, self._max = speculation.min_match, speculation.max_match
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Adds the request's next token."""
        self._tokens.append(token)
        end = len(self._tokens)
        key = tuple(self._tokens[-self._min :])
        # end of the n-gram's last place before this one; 0 for none
        self._previous.append(self._latest.get(key, 0))
        if end >= self._min:
            self._latest[key] = end

    def propose(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest match of the request's end.

        Of equally long matches the latest counts. A match that the request's end overlaps goes on
        periodically. The list is empty where ``min_match`` tokens have no earlier place.
        """
        tokens, size = self._tokens, len(self._tokens)
        best, best_length = 0, 0
        end = self._previous[-1] if self._previous else 0
        for _ in range(MAX_CANDIDATES):
            if not end or best_length == self._max:
                break
            length = self._min
            limit = min(self._max, end)
            while length < limit and tokens[end - length - 1] == tokens[size - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = end, length
            end = self._previous[end - 1]
        if not best:
            return []
        period = size - best
        return [tokens[best + i % period] for i in range(count)]


def verify(drafts: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The tokens that plain decoding would have given.

    Parameters
    ----------
    drafts : k draft tokens
    tokens : k + 1 tokens; token i was chosen from the logits after draft token i - 1

    Returns
    -------
    Between 1 and k + 1 tokens: the accepted drafts, and the token after them.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == tokens[accepted]:
        accepted += 1
    return list(tokens[: accepted + 1])
