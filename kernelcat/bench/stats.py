"""The statistics of a race: medians with exact intervals, paired ratios, ties and the winner.

All of it is distribution-free and deterministic: the interval for a median comes from order
statistics (the sign test inverted), so one block that was interrupted moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)

CONFIDENCE = 0.95
TIE = 0.01
"""Differences under 1 % are ties, however sure they are."""
MARGIN = 0.02
"""A challenger must beat the incumbent by 2 %."""
FAR = 0.03
"""Who wins a tie is in the median at most so far behind."""


@dataclass(frozen=True)
class Interval:
    """A median and the interval that holds the true one with the confidence asked for."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Median of ``values`` with its order-statistic confidence interval.

    With too few values for the confidence (under 6 for 0.95) the interval is their whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise ValueError("the median of nothing")
    drop = _dropped(n, confidence)
    return Interval(median(ordered), ordered[drop], ordered[n - 1 - drop])


def _dropped(n: int, confidence: float) -> int:
    """How many of ``n`` ordered values lie outside the interval on either side."""
    outcomes, drop = 1, 0  # of n fair coins, those with at most ``drop`` heads
    while 2 * drop + 2 < n:
        outcomes += math.comb(n, drop + 1)
        if 2 * outcomes / 2**n > 1 - confidence:
            break
        drop += 1
    return drop


def ratio_interval(
    mine: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Interval of ``mine / other``, paired block by block; above 1 where ``mine`` is slower."""
    logs = [math.log(a / b) for a, b in zip(mine, other, strict=True)]
    found = median_interval(logs, confidence)
    return Interval(math.exp(found.median), math.exp(found.low), math.exp(found.high))


def corrected(comparisons: int, confidence: float = CONFIDENCE) -> float:
    """Confidence each of ``comparisons`` intervals needs for all to hold together (Bonferroni)."""
    return 1 - (1 - confidence) / max(comparisons, 1)


def ties(ratio: Interval, tie: float = TIE) -> bool:
    """Whether the difference is inside the noise, or too small to matter."""
    return ratio.low <= 1.0 or ratio.median < 1.0 + tie


def leader(samples: Mapping[Key, Sequence[float]]) -> Key:
    """The contestant with the smallest typical time, each block scaled by that block's median."""
    keys = list(samples)
    scales = [median(block) for block in zip(*(samples[k] for k in keys), strict=True)]
    return min(keys, key=lambda k: median(t / s for t, s in zip(samples[k], scales, strict=True)))


@dataclass(frozen=True)
class RaceResult:
    """Who won a race, who tied with the fastest, and why the winner is the one it is."""

    winner: Any
    tied: tuple[Any, ...]
    reason: str


def decide(
    samples: Mapping[Key, Sequence[float]],
    order: Callable[[Key], Any],
    incumbent: Key | None = None,
) -> RaceResult:
    """The winner of a race by paired differences.

    Parameters
    ----------
    samples
        Contestant -> microseconds a run; block ``i`` of all contestants ran at the same time.
    order
        Sort key that breaks ties: the simplest first.
    incumbent
        The contestant that won before; it keeps its place unless beaten by ``MARGIN``.
    """
    fastest = leader({key: samples[key] for key in sorted(samples, key=order)})
    confidence = corrected(len(samples) - 1)
    ratios = {k: ratio_interval(s, samples[fastest], confidence) for k, s in samples.items()}
    tied = sorted((k for k, r in ratios.items() if k == fastest or ties(r)), key=order)
    if incumbent in ratios:
        lead = ratios[incumbent]
        if incumbent in tied:
            return RaceResult(incumbent, tuple(tied), "the incumbent ties with the fastest")
        if lead.median < 1 + MARGIN:
            return RaceResult(incumbent, tuple(tied), "nobody beats the incumbent by 2 %")
    if len(tied) == 1:
        return RaceResult(fastest, (fastest,), "fastest beyond noise")
    # A dozen rivals make wide intervals: a median 6 % behind once tied, and won by its name.
    close = next(k for k in tied if k == fastest or ratios[k].median < 1 + FAR)
    return RaceResult(close, tuple(tied), f"simplest of {len(tied)} that tie")
