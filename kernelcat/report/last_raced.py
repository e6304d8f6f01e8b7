"""Which problems of a database a terminal shows: named ones, and the others that were raced last.

A team's database may have thousands of problems. Reading their rows takes many seconds, and nobody
reads so many lines.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from kernelcat import catalog
from kernelcat.store.newest import SUBJECT, Name, Newest

MOST, LEAST = 100, 10
"""Problems without a name that are shown in all, and at least of each table."""


class Place(NamedTuple):
    """A table of the board, in any state and of any kind."""

    gpu: str
    entry: str
    regime: str


class LastRaced:
    """Chooses races of a database; ``left_out`` then has the number of problems left out.

    Parameters
    ----------
    pattern : name of the problems, in which ``*`` stands for any text
    state : thermal state of the races that count; None for all
    most : problems without a name, over all tables
    """

    def __init__(self, pattern: str = "*", state: str | None = None, most: int = MOST) -> None:
        self.left_out: Counter[Place] = Counter()
        self._pattern, self._state, self._most = pattern, state, most

    def __call__(self, newest: Mapping[Name, Newest]) -> set[Name]:
        """The subjects of the problems that are shown."""
        dates: dict[Place, dict[str, str]] = defaultdict(dict)
        subjects: dict[tuple[Place, str], list[Name]] = defaultdict(list)
        for name, run in newest.items():
            subject = dict(zip(SUBJECT, name, strict=True))
            place = Place(subject["gpu"], subject["entry"], subject["regime"])
            problem = subject["problem"]
            subjects[place, problem].append(name)
            if self._state in (None, subject["state"]) and self._is_asked(problem, run):
                of_place = dates[place]
                of_place[problem] = max(run.created_at, of_place.get(problem, ""))
        most = max(LEAST, self._most // max(len(dates), 1))
        chosen: set[Name] = set()
        for place, created_at in dates.items():
            named = _named(place.entry)
            others = sorted((p for p in created_at if p not in named),
                            key=lambda p: (created_at[p], p), reverse=True)  # fmt: skip
            if len(others) > most:
                self.left_out[place] = len(others) - most
            for problem in (*named.intersection(created_at), *others[:most]):
                chosen.update(subjects[place, problem])
        return chosen

    def _is_asked(self, problem: str, run: Newest) -> bool:
        if self._pattern == "*":
            return True
        axes = sorted(json.loads(problem).items())
        title = run.problem_name or " ".join(f"{name}={value}" for name, value in axes)
        return fnmatchcase(title, self._pattern)

    def notes(self) -> list[str]:
        """A line for each table with problems left out, and how to see them."""
        lines = [
            f"{place.entry} on {place.gpu}: {count:,} more "
            f"{'problem was' if count == 1 else 'problems were'} raced earlier."
            for place, count in sorted(self.left_out.items())
        ]
        how = ("Tables and means have the named problems and those that were raced last. --problem "
               "PATTERN selects others; --csv, --json and --html show all.")  # fmt: skip
        return [*lines, how] if lines else []


def _named(entry: str) -> set[str]:
    """The named problems of ``entry``, as canonical JSON."""
    if entry not in catalog.names():
        return set()
    return {problem.key for problem in catalog.entry(entry).problems.values()}
