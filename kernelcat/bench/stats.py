"""The statistics of a race: medians with exact intervals, paired ratios, ties and the winner.

All methods are deterministic and assume no distribution. The interval of a median comes from order
statistics (the inverted sign test), so a single interrupted block hardly changes the result.
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
"""A difference under 1 % is a tie, even where it is statistically significant."""
MARGIN = 0.02
"""A challenger must be 2 % faster than the incumbent to win."""
MAX_LAG = 0.03
"""The simplest contestant wins a tie only if its median is less than 3 % above the fastest."""


@dataclass(frozen=True)
class Interval:
    """A median and its confidence interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Median of ``values`` with the confidence interval from order statistics.

    With too few values for ``confidence`` (fewer than 6 for 0.95) the interval is the whole range
    of the values.

    Raises
    ------
    ValueError
        ``values`` is empty.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise ValueError("no values: the median of nothing is undefined")
    drop = _num_outside(n, confidence)
    return Interval(median(ordered), ordered[drop], ordered[n - 1 - drop])


def _num_outside(n: int, confidence: float) -> int:
    """Number of the ``n`` ordered values that lie outside the interval, on either side."""
    outcomes, drop = 1, 0  # outcomes of n coin tosses with at most ``drop`` heads
    while 2 * drop + 2 < n:
        outcomes += math.comb(n, drop + 1)
        if 2 * outcomes / 2**n > 1 - confidence:
            break
        drop += 1
    return drop


def quantiles(values: Sequence[float], count: int = 32) -> list[float]:
    """The distribution of ``values`` in at most ``count`` ascending numbers.

    All values, sorted, where there are so few; else values at equal steps of rank, of which the
    first is the smallest and the last is the largest. ``count`` is at least 2.
    """
    ordered = sorted(values)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def ratio_interval(
    times: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Median of ``times / baseline``, paired block by block, with its interval.

    Above 1 where ``times`` are slower. Both sequences have one time for each block.
    """
    logs = [math.log(a / b) for a, b in zip(times, baseline, strict=True)]
    interval = median_interval(logs, confidence)
    return Interval(math.exp(interval.median), math.exp(interval.low), math.exp(interval.high))


def corrected_confidence(comparisons: int, confidence: float = CONFIDENCE) -> float:
    """Confidence of each interval such that all intervals together have ``confidence``.

    Bonferroni's correction for ``comparisons`` intervals.
    """
    return 1 - (1 - confidence) / max(comparisons, 1)


def ties(ratio: Interval, tie: float = TIE) -> bool:
    """Whether a ratio of times is within the noise of 1, or less than ``tie`` above 1."""
    return ratio.low <= 1.0 or ratio.median < 1.0 + tie


def leader(samples: Mapping[Key, Sequence[float]]) -> Key:
    """The contestant with the smallest median time.

    Each time is divided by the median of all contestants in its block, which removes drift of the
    clock. ``samples`` maps a contestant to its times, one for each block.
    """
    keys = list(samples)
    scales = [median(block) for block in zip(*(samples[k] for k in keys), strict=True)]
    return min(keys, key=lambda k: median(t / s for t, s in zip(samples[k], scales, strict=True)))


@dataclass(frozen=True)
class RaceResult:
    """The winner of a race, all that tied with the fastest, and the reason why the winner won."""

    winner: Any
    tied: tuple[Any, ...]
    reason: str


def decide(
    samples: Mapping[Key, Sequence[float]],
    order: Callable[[Key], Any],
    incumbent: Key | None = None,
) -> RaceResult:
    """Decides a race by paired differences.

    Parameters
    ----------
    samples
        Contestant -> microseconds of one run, for each block. Times with equal index belong to
        the same block.
    order
        Sort key by which a tie is decided: the simplest contestant sorts first.
    incumbent
        The winner of the previous race. The incumbent wins again unless another contestant is
        faster by ``MARGIN``; an incumbent that is not in ``samples`` is ignored.
    """
    fastest = leader({key: samples[key] for key in sorted(samples, key=order)})
    confidence = corrected_confidence(len(samples) - 1)
    ratios = {k: ratio_interval(s, samples[fastest], confidence) for k, s in samples.items()}
    tied = sorted((k for k, r in ratios.items() if k == fastest or ties(r)), key=order)
    if incumbent in ratios:
        lead = ratios[incumbent]
        if incumbent in tied:
            return RaceResult(incumbent, tuple(tied), "the incumbent ties with the fastest")
        if lead.median < 1 + MARGIN:
            return RaceResult(incumbent, tuple(tied), "no contestant beats the incumbent by 2 %")
    if len(tied) == 1:
        return RaceResult(fastest, (fastest,), "fastest beyond noise")
    # With a dozen contestants the corrected intervals are wide: one with a median 6 % above the
    # fastest once tied, and won because its name sorts first.
    simplest = next(k for k in tied if k == fastest or ratios[k].median < 1 + MAX_LAG)
    return RaceResult(simplest, tuple(tied), f"simplest of {len(tied)} that tie")
