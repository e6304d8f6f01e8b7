"""Random problems of an entry: sizes that no list names."""

from __future__ import annotations

import random

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import Unsupported


def draw(entry: Entry, seed: str, count: int) -> list[Problem]:
    """The first ``count`` random problems of ``entry`` for ``seed``, all of them different.

    None of them is a named problem: those are tuned.

    Raises ``Unsupported`` for an entry without random problems.
    """
    if entry.random_problem is None:
        raise Unsupported(f"{entry.name} has no random problems: its reference/{entry.name}.py "
                          "defines no random_problem")  # fmt: skip
    drawn: list[Problem] = []
    for number in range(count):
        dice = random.Random(f"{seed} {entry.name} {number}")
        while len(drawn) == number:
            problem = entry.problem(**entry.random_problem(dice).values)
            if problem not in drawn and entry.problem_name(problem) is None:
                drawn.append(problem)
    return drawn


def as_called(entry: Entry, problem: Problem) -> Problem:
    """``problem`` as a program calls it: what only describes drawn inputs has its default."""
    drawn = {
        axis.name: axis.default for axis in entry.axes if axis.drawn and axis.default is not None
    }
    return entry.problem(**{**problem.values, **drawn})
