"""Rows of the database in the order in which calls look for them: by problem, bucket and distance.

Grouping the rows of an entry takes milliseconds, and they seldom change. So groups are remembered,
and a choice costs less than a millisecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import log2
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from kernelcat.catalog.axes import AxisValue, any_size
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.store.plausibility import why_no_problem

if TYPE_CHECKING:
    from kernelcat.store import Choice

MAX_DISTANCE = 4.0
"""Largest distance (:meth:`Groups.nearest`) of a measured problem whose winner may serve."""
MAX_REMEMBERED = 64

Majors = tuple[tuple[str, AxisValue], ...]


class _Placed(NamedTuple):
    """A row, and the logarithms of its problem's sizes."""

    choice: Choice
    sizes: tuple[float, ...]


class Groups:
    """The rows of ``choices`` that are of today's specification of ``entry``, best first."""

    def __init__(self, entry: Entry, choices: Sequence[Choice]) -> None:
        self.entry, self.choices = entry, choices
        self._sizes = tuple(a.name for a in entry.axes if not a.values and a.bucket is not any_size)
        self._by_problem: dict[Problem, list[Choice]] = defaultdict(list)
        self._by_bucket: dict[Problem, list[_Placed]] = defaultdict(list)
        self._by_majors: dict[Majors, list[_Placed]] = defaultdict(list)
        axes = set(entry.axis_names)  # rows of an older specification have other axes
        for choice in choices:
            problem = choice.problem
            if problem.values.keys() == axes and why_no_problem(problem) is None:
                placed = _Placed(choice, self._place(problem))
                self._by_problem[problem].append(choice)
                self._by_bucket[entry.bucket(problem)].append(placed)
                self._by_majors[self._majors(problem)].append(placed)

    def exact(self, problem: Problem) -> Sequence[Choice]:
        """The rows of ``problem``."""
        return self._by_problem.get(problem, ())

    def bucketmates(self, problem: Problem) -> list[Choice]:
        """The rows of other problems of the same bucket, the nearest first."""
        placed = self._by_bucket.get(self.entry.bucket(problem), ())
        return [c for _, c in self._by_distance(problem, placed) if c.problem != problem]

    def nearest(self, problem: Problem) -> list[Choice]:
        """The rows at a distance of at most :data:`MAX_DISTANCE`, the nearest first.

        The distance is the sum of ``|log2((first + 1) / (second + 1))|`` over all sizes, without
        those of which all values are one bucket; choices that are not minor must be equal.
        """
        placed = self._by_majors.get(self._majors(problem), ())
        return [c for far, c in self._by_distance(problem, placed) if far <= MAX_DISTANCE]

    def _by_distance(
        self, problem: Problem, rows: Sequence[_Placed]
    ) -> Iterator[tuple[float, Choice]]:
        place = self._place(problem)
        far = [sum(map(abs, map(sub, place, row.sizes))) for row in rows]
        order = sorted(range(len(rows)), key=far.__getitem__)
        return ((far[i], rows[i].choice) for i in order)

    def _place(self, problem: Problem) -> tuple[float, ...]:
        return tuple(log2(problem[name] + 1) for name in self._sizes)

    def _majors(self, problem: Problem) -> Majors:
        return tuple(self.entry.major_choices(problem).items())


_remembered: dict[tuple[int, int], Groups] = {}


def groups(entry: Entry, choices: Sequence[Choice]) -> Groups:
    """The groups of ``choices``; those of tuples, which nobody changes, are remembered."""
    if not isinstance(choices, tuple):
        return Groups(entry, choices)
    key = id(entry), id(choices)
    found = _remembered.get(key)
    if found is None:
        # The groups keep entry and rows alive, so that nothing else takes their identity.
        found = _remembered[key] = Groups(entry, choices)
        while len(_remembered) > MAX_REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)
    return found
