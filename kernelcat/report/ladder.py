"""The ladder of an entry: the speedup of each variant over the previous variant, from one race."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.report.board import Rates, in_catalog
from kernelcat.report.grid import STALE, caption, duration, figure, rate
from kernelcat.report.sheet import Sheet
from kernelcat.store import Measurement, Race, newest_races
from kernelcat.store.races import LADDER, microseconds
from kernelcat.verify import code_record


@dataclass(frozen=True)
class Step:
    """The best configuration of one variant.

    Attributes
    ----------
    median_us, ci_us : microseconds
    rates : TFLOP/s, TB/s, and the share of the roofline
    over_previous : time of the step before, in the same language, over the time of this step; None
        for a language's first step
    over_first : time of the ladder's first step over the time of this step
    peers : peer -> time of the peer over the time of this step; above 1 the step is faster
    techniques : technique -> the instruction in the machine code that proves it
    stale : whether the kernel runs other code today
    """

    language: str
    variant: str
    config: Mapping[str, Any]
    median_us: float
    ci_us: tuple[float, float] | None
    rates: Rates
    over_previous: float | None
    over_first: float
    peers: Mapping[str, float]
    techniques: Mapping[str, str]
    stale: bool


@dataclass(frozen=True)
class Ladder:
    """One race of every variant.

    Attributes
    ----------
    steps : by language, then by the variant's rank; the first step is the naive CUDA kernel where
        there is one
    note : date, run, clocks and power of the race
    """

    entry: str
    gpu: str
    problem: Mapping[str, Any]
    problem_name: str | None
    steps: tuple[Step, ...]
    note: str

    @property
    def first(self) -> str:
        return f"{self.steps[0].language}/{self.steps[0].variant}"

    @property
    def command(self) -> str:
        """The command line that shows this ladder."""
        problem = f" --problem {self.problem_name}" if self.problem_name else ""
        return f"kernelcat ladder {self.entry}{problem} --gpu {self.gpu}"


def ladders(
    measurements: Iterable[Measurement],
    entry: str,
    gpu: str | None = None,
    problem: str | None = None,
    is_current: Callable[[Measurement], bool] = code_record.is_current,
) -> list[Ladder]:
    """The newest ladder of every problem of ``entry``, or of the problem named ``problem``.

    ``gpu`` selects a SKU; ``is_current`` is whether a row timed the code that runs today.

    Raises
    ------
    UnknownName
        There is no such entry or problem.
    """
    spec = catalog.entry(entry)
    problem_key = spec.named(problem).key if problem else None
    races = newest_races(
        row
        for row in measurements
        if row.entry == entry and row.state == LADDER and gpu in (None, row.gpu)
    )
    return [
        _ladder(race, is_current)
        for race in races
        if in_catalog(race) and problem_key in (None, race.key.problem)
    ]


def _ladder(race: Race, is_current: Callable[[Measurement], bool]) -> Ladder:
    implementations = installed(race.key.entry)
    rows = sorted(
        race.rows, key=lambda r: (*height(implementations, r.language, r.variant), -microseconds(r))
    )
    peers = {row.variant: microseconds(row) for row in race.peers}
    steps = []
    for _, variants in groupby(rows, key=lambda row: row.language):
        previous_us = None
        for row in variants:
            time_us = microseconds(row)
            implementation = implementations.get((row.language, row.variant))
            steps.append(
                Step(
                    language=row.language,
                    variant=row.variant,
                    config=dict(row.config),
                    median_us=time_us,
                    ci_us=row.ci_us,
                    rates=Rates.of(row),
                    over_previous=previous_us / time_us if previous_us else None,
                    over_first=microseconds(rows[0]) / time_us,
                    peers={name: time / time_us for name, time in peers.items()},
                    techniques=dict(implementation.techniques) if implementation else {},
                    stale=not is_current(row),
                )
            )
            previous_us = time_us
    best = race.winner
    note = f"{caption(race.measurements)}."
    return Ladder(best.entry, best.gpu, dict(best.problem), best.problem_name, tuple(steps), note)


def installed(entry: str) -> dict[tuple[str, str], Implementation]:
    """Language and variant -> implementation, for every implementation that is installed here."""
    return {(i.language, i.variant): i for i in catalog.implementations(entry)}


def height(
    implementations: Mapping[tuple[str, str], Implementation], language: str, variant: str
) -> tuple[int, int]:
    """Sort key of a step: language, then rank; variants that are not installed come last."""
    implementation = implementations.get((language, variant))
    if implementation is None:
        return len(LANGUAGES), 0
    return LANGUAGES.index(language), implementation.rank


def sheet(ladder: Ladder, code: str = "") -> Sheet:
    """A table with one line for each step; ``code`` is Markdown's mark around code."""
    peers = sorted(ladder.steps[0].peers)
    title = ladder.problem_name or Problem.of(ladder.entry, **ladder.problem)
    headers = ("step", "µs", "rate", "× step before", f"× {ladder.first}",
               *(f"× {peer}" for peer in peers), "proven in the machine code")  # fmt: skip
    notes = [ladder.note, "×: that one's time over the step's, in the same race."]
    if any(step.stale for step in ladder.steps):
        notes.append(f"{STALE} stale: the kernel's sources changed since; measure again.")
    return Sheet(
        title=f"{ladder.entry} {title} on {ladder.gpu}",
        headers=headers,
        lines=[_line(step, peers, code) for step in ladder.steps],
        notes=notes,
        numbers=slice(1, -1),
    )


def _line(step: Step, peers: Sequence[str], code: str) -> tuple[str, ...]:
    return (
        f"{step.language}/{step.variant}" + (STALE if step.stale else ""),
        duration(step.median_us, step.ci_us),
        rate(step.rates),
        figure(step.over_previous) if step.over_previous else "",
        figure(step.over_first),
        *(figure(step.peers[peer]) for peer in peers),
        ", ".join(f"{name} {code}{opcode}{code}" for name, opcode in step.techniques.items()),
    )
