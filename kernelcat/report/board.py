"""Who is fastest, by how much, and how near to the roof: a query over measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import exp, log
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.environment import other_compiler
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import (
    Measurement,
    Race,
    decisive,
    locate,
    newest_races,
    shipped,
    tied,
)
from kernelcat.store.races import preference
from kernelcat.verify import code_record

TERA = 1e12


@dataclass(frozen=True)
class Row:
    """The winner of one problem, compared with everything that ran beside it.

    Attributes
    ----------
    median_us, ci_us : microseconds; the interval is None for a prediction
    tflops, tbps : TFLOP/s and TB/s of the least work that the entry needs
    bound : which roof is lower, ``compute`` or ``memory``
    roofline : share of that roof reached; None for a GPU that is not in the table
    peers : peer -> its time over ours, in the same run; above 1 we are faster
    languages : language -> time of ``baseline`` over that language's best time
    baseline : the fastest peer, or the winner where no peer ran
    ties : ``language/variant`` of those that cannot be told from the winner
    stale : whether the kernel runs other code today
    other_compiler : how the winner's compiler differs from the one of this machine, or None
    """

    entry: str
    gpu: str
    regime: str
    kind: str
    state: str
    problem: Mapping[str, Any]
    problem_name: str | None
    language: str
    variant: str
    config: Mapping[str, Any]
    median_us: float
    ci_us: tuple[float, float] | None
    tflops: float
    tbps: float
    bound: str
    roofline: float | None
    peers: Mapping[str, float]
    languages: Mapping[str, float]
    baseline: str
    ties: tuple[str, ...]
    stale: bool
    run: str
    created_at: str
    sm_clock_mhz: float | None
    power_w: float | None
    other_compiler: str | None

    @property
    def section(self) -> tuple[str, str, str, str, str]:
        """Rows that stand in one table: entry, GPU, regime, kind, thermal state."""
        return self.entry, self.gpu, self.regime, self.kind, self.state

    @property
    def title(self) -> str:
        return self.problem_name or str(Problem.of(self.entry, **self.problem))


@dataclass(frozen=True)
class Rates:
    """What a time means: TFLOP/s, TB/s, the lower roof, and the share of it (None: unknown GPU)."""

    tflops: float
    tbps: float
    bound: str
    roofline: float | None

    @staticmethod
    def of(row: Measurement) -> Rates:
        entry, problem = catalog.entry(row.entry), row.to_problem()
        flops, moved = entry.flops(problem), entry.bytes_moved(problem)
        seconds, (roof, bound) = microseconds(row) * 1e-6, _roof(row, flops, moved)
        share = roof / microseconds(row) if roof else None
        return Rates(flops / seconds / TERA, moved / seconds / TERA, bound, share)


@dataclass(frozen=True)
class Means:
    """Geometric means over ``problems`` rows; a peer's or language's over those it took part in."""

    problems: int
    roofline: float | None
    peers: Mapping[str, float]
    languages: Mapping[str, float]


def load(
    gpu: str | None = None,
    entry: str | None = None,
    regime: str | None = None,
    url: str | None = None,
) -> list[Measurement]:
    """Shipped rows and, where there is a database, those of its newest races.

    Raises
    ------
    StoreError
        The database cannot be read, or ``url`` names one that is not there.
    """
    rows = [
        row
        for row in shipped()
        if gpu in (None, row.gpu) and entry in (None, row.entry) and regime in (None, row.regime)
    ]
    location = locate(url)
    if url is not None or location.path is None or location.path.exists():
        from kernelcat.store import Store

        with Store.open(url, create=False) as store:
            for race in store.winners(gpu=gpu, entry=entry, regime=regime):
                rows += race.measurements
    return rows


def board(
    measurements: Iterable[Measurement],
    gpu: str | None = None,
    entry: str | None = None,
    regime: str | None = "graph",
    state: str | None = None,
    problem: str = "*",
    is_current: Callable[[Measurement], bool] = code_record.is_current,
) -> list[Row]:
    """One row for every problem: the newest run's winner. Largest problems first.

    ``state`` None takes the race that calls go by (:func:`kernelcat.store.decisive`).
    ``problem`` is a name or a pattern, in which ``*`` stands for anything.
    A prediction is left out where the same problem was measured on the same GPU. Rows of entries
    that the catalog does not have, or that had other axes then, are left out too.
    ``is_current`` tells whether a row is of the code that runs today.
    """
    found = newest_races(
        row
        for row in measurements
        if gpu in (None, row.gpu) and entry in (None, row.entry) and regime in (None, row.regime)
    )
    found = decisive(found) if state is None else [r for r in found if r.key.state == state]
    measured = {race.key[:4] for race in found if race.key.kind == "measured"}
    rows = [
        _row(race, is_current)
        for race in found
        if in_catalog(race) and (race.key.kind == "measured" or race.key[:4] not in measured)
    ]
    return sorted((row for row in rows if fnmatchcase(row.title, problem)), key=_place)


def in_catalog(race: Race) -> bool:
    """Whether the entry is there, and its problems have the axes they had in this race."""
    if race.key.entry not in catalog.names():
        return False
    return race.winner.problem.keys() == set(catalog.entry(race.key.entry).axis_names)


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows whose languages have one kind of baseline: peers, unless no row has any."""
    return [row for row in rows if row.peers] or list(rows)


def means(rows: Sequence[Row]) -> Means:
    """Geometric means of the ratios; rows should be of one section."""
    roofs = [row.roofline for row in rows if row.roofline]
    return Means(
        len(rows),
        _geometric_mean(roofs) if roofs else None,
        _mean_by_name(row.peers for row in rows),
        _mean_by_name(row.languages for row in comparable(rows)),
    )


def _row(race: Race, is_current: Callable[[Measurement], bool]) -> Row:
    best, times = race.winner, {row.variant: microseconds(row) for row in race.peers}
    rates, baseline = Rates.of(best), min(times.values(), default=microseconds(best))
    ours: dict[str, float] = {}
    for row in race.rows:
        ours[row.language] = min(microseconds(row), ours.get(row.language, microseconds(row)))
    return Row(
        entry=best.entry,
        gpu=best.gpu,
        regime=best.regime,
        kind=best.kind,
        state=best.state,
        problem=dict(best.problem),
        problem_name=best.problem_name,
        language=best.language,
        variant=best.variant,
        config=dict(best.config),
        median_us=microseconds(best),
        ci_us=best.ci_us,
        **vars(rates),
        peers={name: time / microseconds(best) for name, time in times.items()},
        languages={language: baseline / time for language, time in sorted(ours.items())},
        baseline=race.peers[0].variant if race.peers else f"{best.language}/{best.variant}",
        ties=tuple(f"{r.language}/{r.variant}" for r in race.measurements[1:] if tied(best, r)),
        stale=not is_current(best),
        run=race.run,
        created_at=race.created_at,
        sm_clock_mhz=best.sm_clock_mhz,
        power_w=best.power_w,
        other_compiler=other_compiler(best.language, best.environment.get("compilers", {})),
    )


def _roof(row: Measurement, flops: int, moved: int) -> tuple[float | None, str]:
    gpu, dtype = SKUS.get(row.gpu), str(row.problem.get("dtype", "float32"))
    if gpu is None:
        return None, "compute" if flops > moved else "memory"
    compute, memory = gpu.roofline_us(flops, 0, dtype), gpu.roofline_us(0, moved, dtype)
    return max(compute, memory), "compute" if compute > memory else "memory"


def microseconds(row: Measurement) -> float:
    """The median of a row that ran."""
    assert row.median_us is not None, "only passed rows race"
    return row.median_us


def _geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))


def _mean_by_name(ratios: Iterable[Mapping[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for mapping in ratios:
        for name, ratio in mapping.items():
            by_name.setdefault(name, []).append(ratio)
    return {name: _geometric_mean(values) for name, values in sorted(by_name.items())}


def _place(row: Row) -> tuple[str, str, str, str, int, float, float, str]:
    """By section, then by how much work the problem is."""
    entry, problem = catalog.entry(row.entry), Problem.of(row.entry, **row.problem)
    work = (-entry.flops(problem), -entry.bytes_moved(problem))
    return *row.section[:4], preference(row.state), *work, row.title
