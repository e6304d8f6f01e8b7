"""Random problems of an entry: sizes that no list names."""

from __future__ import annotations

import random

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import Unsupported


def draw(entry: Entry, seed: str, count: int, unusual: bool = False) -> list[Problem]:
    """The first ``count`` random problems of ``entry`` for ``seed``, all of them different.

    None of them is a named problem: those are tuned. With ``unusual`` they have sizes and options
    that no model has.

    Raises ``Unsupported`` for an entry without such problems.
    """
    kind = "unusual_problem" if unusual else "random_problem"
    draw_one = entry.unusual_problem if unusual else entry.random_problem
    if draw_one is None:
        raise Unsupported(f"{entry.name} has no random problems: its reference/{entry.name}.py "
                          f"defines no {kind}")  # fmt: skip
    drawn: list[Problem] = []
    for number in range(count):
        dice = random.Random(f"{seed} {entry.name} {number}")
        while len(drawn) == number:
            problem = entry.problem(**draw_one(dice).values)
            if problem not in drawn and entry.problem_name(problem) is None:
                drawn.append(problem)
    return drawn


def as_called(entry: Entry, problem: Problem) -> Problem:
    """``problem`` as a program calls it: what only describes drawn inputs has its default."""
    drawn = {
        axis.name: axis.default for axis in entry.axes if axis.drawn and axis.default is not None
    }
    return entry.problem(**{**problem.values, **drawn})
