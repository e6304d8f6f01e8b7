"""Which candidates a cross-tune compiles, and in which order.

Compiling takes seconds, so the order decides what a budget buys. Each implementation gets its
turn for each problem: first all compile the candidate with the least estimate, then all a second
one, up to a number of candidates that compile and fit. Code that is compiled once serves every
candidate that needs it. The first candidate has the least estimate, or one that hardly differs and
whose code is there already. Further ones are there to be compared with: those whose code is there,
or that compiled fast for another problem. What did not fit for one problem is not tried for the
next as long as there is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Built, Failed

LOOK_AHEAD = 12
"""Candidates, first by estimate, among which the next one to compile is looked for."""
NEAR = 1.02
"""Factor between estimates up to which ready code takes the place of the least estimate."""

Code = tuple[str, ...]
"""What a candidate is compiled from: candidates of one code share the outcome."""
Outcome = Built | Failed
Kind = tuple[object, ...]
"""Implementation, configuration and choices of the problem: what decides how much code there is."""


@dataclass
class Turn:
    """The candidates of one implementation for one problem, and how many of them fit so far."""

    problem: Problem
    implementation: Implementation
    candidates: Sequence[tuple[Candidate, float]]
    """With their estimates in microseconds, the default first, then by estimate."""
    done: set[Candidate] = field(default_factory=set)
    fitting: int = 0
    waiting: int = 0

    @property
    def is_over(self) -> bool:
        return len(self.done) == len(self.candidates)


Judge = Callable[[Turn, Candidate, Outcome], bool]
"""Takes the outcome of a candidate in; whether the candidate compiles and fits."""


class Plan:
    """Hands out what is to be compiled next, and takes in what came of it.

    Parameters
    ----------
    code : the code of a candidate for a problem
    ready : the outcome for a problem's candidate if the cache has its code, else None
    seconds : how long the compilation of a candidate took
    judge : called once for every candidate whose outcome is known
    """

    def __init__(
        self,
        entry: Entry,
        turns: Sequence[Turn],
        code: Callable[[Turn, Candidate], Code],
        ready: Callable[[Turn, Candidate], Outcome | None],
        seconds: Callable[[Problem, Candidate], float],
        judge: Judge,
    ) -> None:
        self.entry, self.turns = entry, turns
        self._code, self._ready, self._seconds, self._judge = code, ready, seconds, judge
        self._outcomes: dict[Code, Outcome] = {}
        self._waiting: dict[Code, list[tuple[Turn, Candidate]]] = {}
        self._misfits: set[Kind] = set()
        self._took: dict[Kind, float] = {}
        self.compiled = 0

    def jobs(self, goal: int) -> Iterator[tuple[Problem, Candidate]]:
        """What must be compiled so that ``goal`` candidates of each turn fit, as far as known now.

        Ends where all that is left waits for outcomes; then ask again.
        """
        for count in range(1, goal + 1):
            for turn in self.turns:
                while turn.fitting + turn.waiting < count:
                    candidate = self._next(turn)
                    if candidate is None:
                        break
                    turn.done.add(candidate)
                    code = self._code(turn, candidate)
                    outcome = self._known(turn, candidate)
                    if outcome is not None:
                        self._settle(turn, candidate, outcome)
                        continue
                    turn.waiting += 1
                    others = self._waiting.setdefault(code, [])
                    others.append((turn, candidate))
                    if len(others) == 1:
                        yield turn.problem, candidate

    def took(self, problem: Problem, candidate: Candidate, outcome: Outcome) -> None:
        """Takes in the outcome of a job."""
        self.compiled += 1
        turn = next(t for t in self.turns if t.problem == problem and candidate in t.done
                    and t.implementation.language == candidate.language
                    and t.implementation.variant == candidate.variant)  # fmt: skip
        code = self._code(turn, candidate)
        self._outcomes[code] = outcome
        self._took[self._kind(turn, candidate)] = self._seconds(problem, candidate)
        for each, other in self._waiting.pop(code):
            each.waiting -= 1
            self._settle(each, other, outcome)

    def not_compiled(self) -> list[tuple[Turn, Candidate]]:
        """The candidates that still wait for their code."""
        return [each for waiting in self._waiting.values() for each in waiting]

    def _settle(self, turn: Turn, candidate: Candidate, outcome: Outcome) -> None:
        if self._judge(turn, candidate, outcome):
            turn.fitting += 1
        else:
            self._misfits.add(self._kind(turn, candidate))

    def _known(self, turn: Turn, candidate: Candidate) -> Outcome | None:
        """The outcome of a candidate, if its code was compiled in this tune or before."""
        code = self._code(turn, candidate)
        if code not in self._outcomes:
            outcome = self._ready(turn, candidate)
            if outcome is None:
                return None
            self._outcomes[code] = outcome
        return self._outcomes[code]

    def _kind(self, turn: Turn, candidate: Candidate) -> Kind:
        """What a candidate has in common with its like for other problems."""
        majors = tuple(self.entry.major_choices(turn.problem).items())
        return turn.implementation.name, candidate.config, majors

    def _next(self, turn: Turn) -> Candidate | None:
        """The candidate to try next; None if all were tried."""
        left = [(c, us) for c, us in turn.candidates if c not in turn.done]
        if not left:
            return None
        hopeful = [(c, us) for c, us in left if self._kind(turn, c) not in self._misfits]
        if not hopeful:
            return left[0][0]
        first, least_us = hopeful[0]
        is_first = not turn.fitting and not turn.waiting
        for candidate, us in hopeful:
            if (not is_first or us <= NEAR * least_us) and self._is_there(turn, candidate):
                return candidate
        if is_first or not self._took:
            return first
        usual = sorted(self._took.values())[len(self._took) // 2]
        return min(hopeful, key=lambda each: self._took.get(self._kind(turn, each[0]), usual))[0]

    def _is_there(self, turn: Turn, candidate: Candidate) -> bool:
        """Whether the code of a candidate is compiled, or is being compiled."""
        return self._code(turn, candidate) in self._waiting or isinstance(
            self._known(turn, candidate), Built
        )
