"""Portfolios: the few configurations among which the best of each problem is near the best of all.

A table holds what is known or predicted of many configurations on many problems.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kernelcat.report.predictions import Contestant

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

WORTH = 0.000075
"""What a further configuration must take from the mean loss."""
UNSERVED = 1.0
"""Loss of a problem that nothing serves: e times the least time."""


class Table(NamedTuple):
    """Times of contestants on problems.

    Attributes
    ----------
    contestants : in the order of their names and configurations
    log_us : (contestants, problems), logarithms of microseconds, infinite where there is no time
    """

    contestants: list[Contestant]
    log_us: Floats

    @staticmethod
    def of(served: Sequence[Mapping[Contestant, float]]) -> Table:
        """A table of each problem's times in microseconds."""
        names = sorted(set().union(*served), key=_order)
        places = {each: place for place, each in enumerate(names)}
        us = np.full((len(names), len(served)), np.inf)
        for number, times in enumerate(served):
            us[[places[each] for each in times], number] = list(times.values())
        return Table(names, np.log(us))

    def implementations(self) -> Iterator[tuple[str, slice]]:
        """The name of each implementation, and its rows."""
        start = 0
        for name, group in groupby(self.contestants, key=lambda each: each[0]):
            stop = start + sum(1 for _ in group)
            yield name, slice(start, stop)
            start = stop

    def beside(self, other: Table) -> Table:
        """The problems of both tables."""
        names = sorted({*self.contestants, *other.contestants}, key=_order)
        places = {each: place for place, each in enumerate(names)}
        columns = []
        for table in (self, other):
            column = np.full((len(names), table.log_us.shape[1]), np.inf)
            column[[places[each] for each in table.contestants]] = table.log_us
            columns.append(column)
        return Table(names, np.hstack(columns))


def _order(contestant: Contestant) -> tuple[str, str]:
    name, config = contestant
    return name, config.key


def cover(table: Table, most: int) -> list[Contestant]:
    """Contestants, at most ``most``, of which the best one of each problem is near the best of all.

    Contestants join one by one, each time the one that takes most from the mean loss; then those
    leave that others have made superfluous. Each one of the result takes :data:`WORTH` from it, or
    more. A loss is the logarithm of a time over the least one; a problem that nothing in the result
    serves loses :data:`UNSERVED`. Problems without a time do not count.
    """
    least = table.log_us.min(axis=0, initial=np.inf)
    known = np.isfinite(least)
    losses = table.log_us[:, known] - least[known]

    def left(chosen: Sequence[int]) -> Floats:
        return losses[chosen].min(axis=0, initial=UNSERVED)

    def gain(each: int, others: Floats) -> float:
        """What a contestant takes from the mean loss."""
        return float(np.maximum(others - losses[each], 0.0).mean())

    chosen: list[int] = []
    remaining = left(chosen)
    # The more are chosen, the less each other one gains. So a gain is counted anew only where the
    # one of before is the greatest.
    bounds = [(-gain(each, remaining), each) for each in range(len(losses))]
    heapq.heapify(bounds)
    while bounds and len(chosen) < most:
        _, best = bounds[0]
        gained = gain(best, remaining)
        heapq.heapreplace(bounds, (-gained, best))
        if bounds[0][1] != best:
            continue  # another one may gain more
        if gained < WORTH:
            break
        heapq.heappop(bounds)
        chosen.append(best)
        remaining = np.minimum(remaining, losses[best])
    for each in tuple(chosen):
        others = [other for other in chosen if other != each]
        if gain(each, left(others)) < WORTH:
            chosen = others
    return [table.contestants[each] for each in chosen]
