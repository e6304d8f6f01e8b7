"""Evidence in committed measurements: races, configurations that won, bytes that were counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.implementation import ConfigValue
from kernelcat.report.board import Rates
from kernelcat.report.grid import figure, percent, rate
from kernelcat.report.techniques.evidence import GPU, MEASURED, Evidence, Link
from kernelcat.store import Measurement, Race, newest_races, shipped, tied
from kernelcat.store.races import BURST, STATES, SUSTAINED
from kernelcat.verify import code_record, profiles
from kernelcat.verify.profiles import Profile

FASTER, SLOWER, TIE = "faster", "slower", "a tie"
_WINNER = ""
_REGIMES = {"graph": "replayed from a CUDA graph", "eager": "called one by one"}


@cache
def _races() -> tuple[Race, ...]:
    """The newest committed race of every problem, regime and thermal state."""
    return tuple(race for race in newest_races(shipped()) if race.key.gpu == GPU)


def find_race(entry: str, problem: str, regime: str = "graph", state: str = "") -> Race | None:
    """The committed race of a named problem; by default in the state that decides calls."""
    found = [
        race
        for race in _races()
        if (race.key.entry, race.key.regime, race.key.kind) == (entry, regime, MEASURED)
        and race.winner.problem_name == problem
        and race.key.state in ([state] if state else STATES)
    ]
    return min(found, key=lambda race: STATES.index(race.key.state), default=None)


def newest_row(entry: str, problem: str, variant: str) -> Measurement | None:
    """The row of ``language/variant`` in the race that decides calls; None if it did not race."""
    race = find_race(entry, problem)
    return _row(race.rows, variant) if race else None


def _row(rows: Iterable[Measurement], variant: str) -> Measurement | None:
    """The row of ``language/variant``; the first for the empty name."""
    return next((r for r in rows if variant in (_WINNER, f"{r.language}/{r.variant}")), None)


@dataclass(frozen=True)
class Effect(Evidence):
    """The ratio of two times from one run.

    Attributes
    ----------
    entry, problem : names
    this, other : ``language/variant``, or ``peer/NAME``; empty for the winner of the race
    outcome : ``faster`` if ``this`` takes less time than ``other``, ``slower``, or ``a tie``
    other_problem, other_regime : of ``other``, where it differs
    regime : ``graph`` or ``eager``
    state : thermal state; default: the one that decides calls
    """

    entry: str
    problem: str
    this: str
    other: str
    outcome: str = FASTER
    other_problem: str = ""
    other_regime: str = ""
    regime: str = "graph"
    state: str = ""

    @property
    def level(self) -> str:
        return MEASURED

    @property
    def implementations(self) -> tuple[str, ...]:
        rows = self.rows()
        names = [f"{r.entry}/{r.language}/{r.variant}" for r in rows[:1] if not r.is_peer]
        return tuple(names)

    def rows(self) -> tuple[Measurement, ...]:
        """The rows of ``this`` and ``other``; fewer where there is no such row."""
        race = find_race(self.entry, self.problem, self.regime, self.state)
        if race is None:
            return ()
        other = find_race(
            self.entry,
            self.other_problem or self.problem,
            self.other_regime or self.regime,
            race.key.state,
        )
        pair = (
            _row(race.measurements, self.this),
            _row(other.measurements if other else (), self.other),
        )
        return tuple(row for row in pair if row is not None)

    @property
    def ratio(self) -> float:
        """Time of ``other`` over time of ``this``."""
        this, other = self.rows()
        assert this.median_us and other.median_us
        return other.median_us / this.median_us

    def faults(self) -> list[str]:
        rows = self.rows()
        if len(rows) < 2:
            return [f"{self.entry} {self.problem}: {self.this} and {self.other} never raced"]
        faults = []
        if rows[0].run != rows[1].run:
            faults.append(f"{self.entry} {self.problem}: the times are from two runs")
        outcome = TIE if tied(*rows) else FASTER if self.ratio > 1 else SLOWER
        if outcome != self.outcome:
            faults.append(f"{self.entry} {self.problem}: {self.ratio:.2f} is {outcome}")
        return faults

    def text(self, link: Link) -> str:
        title = link(f"{self.entry} {self.problem}", _results(self.entry))
        rows = self.rows()
        if len(rows) < 2:
            return _no_race(title)
        this, other = rows
        times = [f"{self._label(row)} {figure(row.median_us or 0)} µs" for row in (this, other)]
        stale = "" if all(map(code_record.is_current, (this, other))) else "; older code"
        return (
            f"race {title}: {times[0]}, {times[1]}, a ratio of {figure(self.ratio)} "
            f"({this.state}, {this.created_at[:10]}{stale})"
        )

    def _label(self, row: Measurement) -> str:
        """The variant, and what else sets the two rows apart."""
        name = row.variant if row.is_peer else f"{row.language}/{row.variant}"
        problem = f" for {row.problem_name}" if self.other_problem else ""
        regime = f" {_REGIMES[row.regime]}" if self.other_regime else ""
        return f"`{name}`{problem}{regime}"

    def data(self) -> dict[str, Any]:
        rows = self.rows()
        data = super().data() | {"entry": self.entry, "problem": self.problem}
        if len(rows) < 2:
            return data
        this, other = rows
        return data | {
            "us": [this.median_us, other.median_us],
            "ratio": self.ratio,
            "run": this.run,
        }


def _no_race(title: str) -> str:
    """What stands in place of times whose rows were dropped, because the code has changed."""
    return f"race {title}: needs a new race"


def _results(entry: str) -> str:
    """Path of the page that shows the races of an entry."""
    folder = "entries" if catalog.entry(entry).work_in_progress else "results"
    return f"docs/{folder}/{entry}.md"


@dataclass(frozen=True)
class Reached(Evidence):
    """The share of the roofline that a variant reached.

    Attributes
    ----------
    entry, problem, variant : names
    least : share that it must reach, or the evidence does not hold
    """

    entry: str
    problem: str
    variant: str
    least: float

    @property
    def level(self) -> str:
        return MEASURED

    @property
    def implementations(self) -> tuple[str, ...]:
        return (f"{self.entry}/{self.variant}",)

    def rates(self) -> Rates | None:
        """Rates and share in the race that decides calls; None if the variant did not race."""
        row = newest_row(self.entry, self.problem, self.variant)
        return Rates.of(row) if row else None

    def faults(self) -> list[str]:
        rates = self.rates()
        if rates is None or rates.roofline is None:
            return [f"{self.entry} {self.problem}: {self.variant} never raced"]
        if rates.roofline < self.least:
            return [f"{self.entry} {self.problem}: {rates.roofline:.2f} of the roof"]
        return []

    def text(self, link: Link) -> str:
        rates = self.rates()
        title = link(f"{self.entry} {self.problem}", _results(self.entry))
        if rates is None:
            return _no_race(title)
        share = percent(rates.roofline)
        return f"race {title}: `{self.variant}` reached {rate(rates)}, {share} of the roof"

    def data(self) -> dict[str, Any]:
        rates = self.rates()
        return super().data() | (asdict(rates) if rates is not None else {})


@dataclass(frozen=True)
class Kept(Evidence):
    """How often the tuner kept a value of a parameter, in races with the parameter's other values.

    Attributes
    ----------
    implementation : ``gemm/cuda/wgmma``
    parameter, values : a tuning parameter, and the values that use the technique
    """

    implementation: str
    parameter: str
    values: tuple[ConfigValue, ...]

    @property
    def level(self) -> str:
        return MEASURED

    @property
    def implementations(self) -> tuple[str, ...]:
        return (self.implementation,)

    def count(self) -> tuple[int, int]:
        """Races in which the best configuration has one of the values, and all races."""
        entry, _, variant = self.implementation.partition("/")
        rows = [
            row
            for race in _races()
            if race.key.entry == entry
            and race.key.regime == "graph"
            and race.key.state in (SUSTAINED, BURST)
            and (row := _row(race.rows, variant))
        ]
        return sum(row.config.get(self.parameter) in self.values for row in rows), len(rows)

    def faults(self) -> list[str]:
        entry, language, variant = self.implementation.split("/")
        space = catalog.implementation(entry, language, variant).space
        choices = space.get(self.parameter, ())
        name = f"{self.implementation} {self.parameter}"
        faults = [f"{name} has no value {v!r}" for v in self.values if v not in choices]
        if len(choices) <= len(self.values):
            faults.append(f"{name} has no other values")
        if not self.count()[0]:
            faults.append(f"{name} was never kept as {self.values}")
        return faults

    def text(self, link: Link) -> str:
        kept, total = self.count()
        entry = self.implementation.partition("/")[0]
        name = link(f"`{self.implementation}`", _results(entry))
        values = " or ".join(map(str, self.values))
        return f"the tuner kept `{self.parameter}={values}` of {name} in {kept} of {total} races"

    def data(self) -> dict[str, Any]:
        kept, total = self.count()
        return super().data() | {"kept": kept, "races": total}


@dataclass(frozen=True)
class Counted(Evidence):
    """Bytes that the hardware counted for two variants, each in its best configuration.

    Attributes
    ----------
    counter : an attribute of :class:`kernelcat.verify.profiles.Counts`
    fewer : whether ``this`` moves fewer bytes than ``other``
    """

    entry: str
    problem: str
    this: str
    other: str
    counter: str
    fewer: bool = True

    @property
    def level(self) -> str:
        return MEASURED

    @property
    def implementations(self) -> tuple[str, ...]:
        return (f"{self.entry}/{self.this}",)

    def bytes(self) -> tuple[int, ...]:
        """The bytes of ``this`` and ``other``; fewer numbers where a profile is missing."""
        found = {f"{p.language}/{p.variant}": p for p in _profiles(self.entry, self.problem)}
        pair = [found.get(name) for name in (self.this, self.other)]
        return tuple(getattr(p.counts, self.counter) for p in pair if p is not None)

    def faults(self) -> list[str]:
        counts = self.bytes()
        if len(counts) < 2:
            return [f"{self.entry} {self.problem}: {self.this} or {self.other} has no profile"]
        if (counts[0] < counts[1]) != self.fewer:
            return [f"{self.entry} {self.problem}: {counts[0]} and {counts[1]} bytes"]
        return []

    def text(self, link: Link) -> str:
        this, other = (f"{count / 1e6:,.0f} MB" for count in self.bytes())
        title = link(f"{self.entry} {self.problem}", _results(self.entry))
        return (
            f"the profiler counted `{self.counter}` of {title}: `{self.this}` {this}, "
            f"`{self.other}` {other}"
        )


@cache
def _profiles(entry: str, problem: str) -> Sequence[Profile]:
    every = profiles.read(profiles.shipped_folder())
    return [p for p in every if (p.gpu, p.entry, p.problem_name) == (GPU, entry, problem)]
