"""Lengths of the sequences of a call, of which only the mean and the greatest are known: for cost
models of all languages."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp, log
from typing import NamedTuple

from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.paged_cache import context, mean_context


class Lengths(NamedTuple):
    """Log-uniform lengths in tokens, whose mean is what the pages tell and whose greatest is the
    room of the table."""

    least: float
    longest: float
    spread: float
    """Logarithm of the ratio of both; 0 where all sequences are alike."""
    padding: float
    """Tokens for which the last page of a sequence has room besides, on average."""

    def tiles(self, tokens: float, block_n: int) -> float:
        """Tiles of ``block_n`` tokens of a sequence, of those whose pages hold ``tokens``."""
        if self.spread == 0:
            return max(ceil(tokens / block_n), 1)
        return max((tokens - self.padding) / block_n + 0.5, 1.0)

    def used_splits(self, block_n: int, splits: int) -> tuple[float, float]:
        """Splits with a tile of ``block_n`` tokens, of a sequence on average, and the share of the
        sequences with a single tile."""
        longest = max(self.longest / block_n, 1.0)
        if self.spread == 0:
            return min(splits, ceil(longest)), float(longest <= 1)
        least = self.least / block_n
        one = min(max(least, 1.0), longest)
        alone = log(one / least) / self.spread
        if splits <= one:
            return splits, alone
        few = min(splits, longest)
        return alone + (few - one + few * log(longest / few)) / self.spread, alone


@lru_cache(256)  # estimates of all configurations ask for the same problem
def lengths_of(problem: Problem) -> Lengths:
    """The lengths that a call of ``problem`` is assumed to have."""
    longest, tokens = context(problem), mean_context(problem)
    if not 1 <= tokens < longest:
        return Lengths(longest, longest, 0.0, 0.0)
    share = tokens / longest  # of log-uniform lengths: (1 - exp(-spread)) / spread
    spread = 1 / share
    for _ in range(6):  # Newton's method
        spread -= (1 - exp(-spread) - share * spread) / (exp(-spread) - share)
    spread = min(spread, log(longest))
    return Lengths(longest * exp(-spread), longest, spread, (problem["page_size"] - 1) / 2)
