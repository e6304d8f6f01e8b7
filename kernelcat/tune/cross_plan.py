"""Which candidates a cross-tune compiles, and in which order.

Compiling takes seconds, so the order decides what a budget buys. Code that is compiled once serves
every candidate that needs it, of any problem. What the cache has is taken first. Then each
implementation gets a candidate near its least estimate for each problem, and after that further
candidates, up to a number that compile and fit. Next comes always the code that serves most of them
for its seconds (the greedy algorithm for covering a set by weighted subsets). How long code will
compile is learned from the code before it. What did not fit for one problem is not tried for the
next as long as there is another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Built, Failed

LOOK_AHEAD = 48
"""Candidates, first by estimate, among which those to compile are chosen."""
NEAR = 1.05
"""Factor of the least estimate up to which a candidate stands for the best one."""

Code = tuple[str, ...]
"""What a candidate is compiled from: candidates of one code share the outcome."""
Outcome = Built | Failed


@dataclass(frozen=True, eq=False)
class Kind:
    """What decides how much code there is. Equal kinds are one object."""

    implementation: str
    items: tuple[tuple[str, object], ...]
    """Names and values of the configuration, and of the problem's choices."""


@dataclass(frozen=True)
class Option:
    """A candidate of a turn: its estimate in microseconds, its code and its kind."""

    candidate: Candidate
    us: float
    code: Code
    kind: Kind


@dataclass(eq=False)
class Turn:
    """The candidates of one implementation for one problem, and how many of them fit so far."""

    problem: Problem
    implementation: Implementation
    candidates: Sequence[tuple[Candidate, float]]
    """With their estimates in microseconds, the default first, then by estimate."""
    left: dict[Candidate, Option] = field(default_factory=dict)
    """The candidates that were not tried."""
    waiting: dict[Candidate, Option] = field(default_factory=dict)
    """The candidates that are being compiled."""
    fitting: int = 0
    best_us: float = inf
    """The least prediction of the candidates that fit."""

    @property
    def is_over(self) -> bool:
        """Whether all candidates were tried."""
        return not self.left and not self.waiting

    @property
    def num_expected(self) -> int:
        """Candidates that fit, if all that are being compiled do."""
        return self.fitting + len(self.waiting)

    @property
    def expected_us(self) -> float:
        """The least prediction, if all that are being compiled fit."""
        return min(self.best_us, *(each.us for each in self.waiting.values()), inf)


Judge = Callable[[Turn, Candidate, Outcome], float | None]
"""Takes in the outcome of a candidate; its predicted microseconds, None if it does not fit."""


class CompileSeconds:
    """CPU seconds that code takes to compile, learned from those of code before it.

    What is expected of a kind is the mean of the implementation, times a factor for each value of
    the configuration and of the problem's choices: by how much code with the value took longer.
    """

    def __init__(self) -> None:
        self._sums: dict[object, tuple[float, int]] = {}
        self._expected: dict[Kind, float] = {}

    def took(self, kind: Kind, seconds: float) -> None:
        name = kind.implementation
        for key in (None, name, *((name, item) for item in kind.items)):
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = total + seconds, count + 1
        self._expected.clear()

    def expected(self, kind: Kind) -> float:
        """Seconds; 1 where nothing was compiled so far."""
        if kind not in self._expected:
            name = kind.implementation
            mean = seconds = self._mean(name, self._mean(None, 1.0))
            for item in kind.items:
                seconds *= self._mean((name, item), mean) / mean
            self._expected[kind] = seconds
        return self._expected[kind]

    def _mean(self, key: object, prior: float) -> float:
        """The mean, with ``prior`` as one observation more."""
        total, count = self._sums.get(key, (0.0, 0))
        return max((total + prior) / (count + 1), 1e-3)


class Plan:
    """Hands out what is to be compiled next, and takes in what came of it.

    Parameters
    ----------
    code : the code of a candidate for a problem
    ready : the outcome for a problem's candidate if the cache has its code, else None
    judge : called once for every candidate whose outcome is known
    """

    def __init__(
        self,
        entry: Entry,
        turns: Sequence[Turn],
        code: Callable[[Turn, Candidate], Code],
        ready: Callable[[Turn, Candidate], Outcome | None],
        judge: Judge,
    ) -> None:
        self.turns = turns
        self._ready, self._judge = ready, judge
        self._users: dict[Code, list[Turn]] = defaultdict(list)
        self._outcomes: dict[Code, Outcome] = {}
        self._misfits: set[Kind] = set()
        self.compile_seconds = CompileSeconds()
        self.compiled = 0
        kinds: dict[object, Kind] = {}
        for turn in turns:
            majors = entry.major_choices(turn.problem).items()
            for candidate, us in turn.candidates:
                name, items = turn.implementation.name, (*candidate.config.items(), *majors)
                kind = kinds.setdefault((name, items), Kind(name, items))
                option = Option(candidate, us, code(turn, candidate), kind)
                turn.left[candidate] = option
                if turn not in self._users[option.code][-1:]:
                    self._users[option.code].append(turn)

    def jobs(self, goal: int) -> Iterator[tuple[Problem, Candidate]]:
        """What must be compiled so that ``goal`` candidates of each turn fit, as far as known now.

        Ends where all that is left waits for outcomes; then ask again.
        """
        for turn in self.turns:
            for option in list(turn.left.values()):
                if turn.num_expected >= goal and not self._lacks_best(turn):
                    break
                self._settle_known(turn, option)
        while (code := self._most_useful(goal)) is not None:
            users = [(turn, option) for turn in self._users[code]
                     for option in turn.left.values() if option.code == code]  # fmt: skip
            for turn, option in users:
                turn.waiting[option.candidate] = turn.left.pop(option.candidate)
            turn, option = users[0]
            yield turn.problem, option.candidate

    def took(self, problem: Problem, candidate: Candidate, outcome: Outcome) -> None:
        """Takes in the outcome of a job."""
        self.compiled += 1
        option = next(
            turn.waiting[candidate] for turn in self.turns
            if turn.problem == problem and candidate in turn.waiting
        )  # fmt: skip
        self._outcomes[option.code] = outcome
        if isinstance(outcome, Built):
            self.compile_seconds.took(option.kind, outcome.cpu_s)
        for turn in self._users[option.code]:
            for each in [each for each in turn.waiting.values() if each.code == option.code]:
                del turn.waiting[each.candidate]
                self._settle(turn, each, outcome)

    def _most_useful(self, goal: int) -> Code | None:
        """The code to compile next: first for candidates near the best, then for any.

        None where all that is left waits.
        """
        lacking = [turn for turn in self.turns if self._lacks_best(turn)]
        scores: dict[Code, float] = defaultdict(float)
        for turn in lacking or (turn for turn in self.turns if turn.num_expected < goal):
            options = self._hopeful(turn) or list(turn.left.values())
            if lacking:
                least_us = min(option.us for option in options)
                options = [option for option in options if option.us <= NEAR * least_us]
            for option in options:
                scores[option.code] += 1 / self.compile_seconds.expected(option.kind)
        return max(scores, key=lambda code: scores[code], default=None)

    def _lacks_best(self, turn: Turn) -> bool:
        """Whether a candidate left may be better than all before by more than :data:`NEAR`."""
        least_us = min((option.us for option in self._hopeful(turn)), default=inf)
        return turn.expected_us > NEAR * least_us or (not turn.num_expected and bool(turn.left))

    def _hopeful(self, turn: Turn) -> list[Option]:
        """Candidates left to try, without those whose like did not fit."""
        return [option for option in turn.left.values() if option.kind not in self._misfits]

    def _settle_known(self, turn: Turn, option: Option) -> None:
        """Takes in the outcome of a candidate whose code was compiled in this tune or before."""
        outcome = self._outcomes.get(option.code) or self._ready(turn, option.candidate)
        if outcome is not None:
            self._outcomes[option.code] = outcome
            del turn.left[option.candidate]
            self._settle(turn, option, outcome)

    def _settle(self, turn: Turn, option: Option, outcome: Outcome) -> None:
        us = self._judge(turn, option.candidate, outcome)
        if us is None:
            self._misfits.add(option.kind)
        else:
            turn.fitting += 1
            turn.best_us = min(turn.best_us, us)
