"""The leaderboard as data: each problem's winner, its peers, and its share of the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import exp, log
from typing import TYPE_CHECKING, Any

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.environment import other_compiler
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import (
    Measurement,
    Race,
    decisive,
    history,
    locate,
    newest_races,
    plausibility,
    shipped,
    tied,
)
from kernelcat.store.history import Past
from kernelcat.store.races import Key, microseconds, preference
from kernelcat.verify import code_record

if TYPE_CHECKING:
    from kernelcat.store import Store
    from kernelcat.store.newest import Choice

TERA = 1e12


@dataclass(frozen=True)
class Row:
    """The winner of one problem, compared with everything that ran in the same race.

    Attributes
    ----------
    gpu : SKU
    median_us, ci_us : microseconds; the interval is None for a prediction
    tflops, tbps : TFLOP/s and TB/s of the entry's minimum work (``flops`` and ``bytes_moved``)
    bound : the limit of the roofline, ``compute`` or ``memory``
    roofline : share of the roofline that was reached; None for a GPU that is not in the table
    peers : peer -> time of the peer over time of the winner; above 1 the winner is faster
    languages : language -> time of ``baseline`` over the language's best time
    baseline : the fastest peer, or the winner where no peer ran
    ties : ``language/variant`` of each row that ties with the winner
    stale : whether the winner's kernel runs other code today
    sm_clock_mhz, power_w : MHz and W during the measurement; None where unknown
    other_compiler : how the winner's compiler differs from this machine's compiler, or None
    doubtful : ``language/variant: reason`` of each result that was left out, as it cannot be true
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
    doubtful: tuple[str, ...] = ()

    @property
    def section(self) -> tuple[str, str, str, str, str]:
        """Entry, GPU, regime, kind and thermal state: rows of one section share a table."""
        return self.entry, self.gpu, self.regime, self.kind, self.state

    @property
    def title(self) -> str:
        return self.problem_name or str(Problem.of(self.entry, **self.problem))


@dataclass(frozen=True)
class Rates:
    """A time as rates.

    Attributes
    ----------
    tflops, tbps : TFLOP/s and TB/s of the entry's minimum work
    bound : the limit of the roofline, ``compute`` or ``memory``
    roofline : share of the roofline; None for a GPU that is not in the table
    """

    tflops: float
    tbps: float
    bound: str
    roofline: float | None

    @staticmethod
    def of(row: Measurement) -> Rates:
        entry, problem = catalog.entry(row.entry), row.to_problem()
        flops, moved = entry.flops(problem), entry.bytes_moved(problem)
        seconds = microseconds(row) * 1e-6
        roof, bound = _roof(row.gpu, entry.product_dtype(problem), flops, moved)
        share = roof / microseconds(row) if roof else None
        return Rates(flops / seconds / TERA, moved / seconds / TERA, bound, share)


@dataclass(frozen=True)
class Means:
    """Geometric means over rows; ``problems`` is their number.

    The mean of a peer or of a language covers the rows in which it has a ratio.
    """

    problems: int
    roofline: float | None
    peers: Mapping[str, float]
    languages: Mapping[str, float]


def load(
    gpu: str | None = None,
    entry: str | None = None,
    regime: str | None = None,
    url: str | None = None,
    as_copy: bool = False,
    choose: Choice | None = None,
) -> list[Measurement]:
    """Shipped rows and, where there is a database, the rows of its newest races.

    Doubtful rows are among them, and the rows of the races that take their places.
    ``gpu`` (SKU), ``entry`` and ``regime`` select rows; ``url`` names the database,
    of which ``as_copy`` reads a private copy: then the file is not touched. ``choose`` selects
    races of the database.

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
    with _database(url, as_copy) as store:
        if store is not None:
            races = store.winners(gpu, entry, regime, choose)
            races += plausibility.sound(races, store)
            rows += {row.digest: row for race in races for row in race.measurements}.values()
    return rows


def load_past(
    gpu: str | None = None, entry: str | None = None, url: str | None = None, as_copy: bool = False
) -> list[Measurement]:
    """Winners and fastest peers of earlier races, shipped and local; arguments as of :func:`load`.

    Raises
    ------
    StoreError
        The database cannot be read, or ``url`` names one that is not there.
    """
    rows = [row for row in history.shipped(entry) if gpu in (None, row.gpu)]
    with _database(url, as_copy) as store:
        return rows if store is None else rows + store.best_rows(gpu, entry)


@contextmanager
def _database(url: str | None, as_copy: bool) -> Iterator[Store | None]:
    """The open database; None where ``url`` is None and there is no database yet."""
    location = locate(url)
    if url is None and location.path is not None and not location.path.exists():
        yield None
        return
    from kernelcat.store import Store

    with Store.open(url, create=False, as_copy=as_copy) as store:
        yield store


def board(
    measurements: Iterable[Measurement],
    gpu: str | None = None,
    entry: str | None = None,
    regime: str | None = "graph",
    state: str | None = None,
    problem: str = "*",
    is_current: Callable[[Measurement], bool] = code_record.is_current,
    doubt: Callable[[Measurement], str | None] = lambda row: None,
) -> list[Row]:
    """One row for every problem: the winner of its newest race. Largest problems come first.

    Left out are predictions for problems that were measured on the same GPU, and races of entries
    that the catalog does not have or that had other axes then.

    Parameters
    ----------
    gpu, entry, regime : only races of this SKU, entry and regime
    state : only races in this thermal state; None selects the race that decides calls
        (:func:`kernelcat.store.decisive`)
    problem : name of the problems, in which ``*`` stands for any text
    is_current : whether a row timed the code that runs today
    doubt : why a row cannot be true, or None; a row with a reason is left out of its race
    """
    sound, doubtful = [], dict[tuple[str, ...], list[str]]()
    for row in measurements:
        if gpu in (None, row.gpu) and entry in (None, row.entry) and regime in (None, row.regime):
            reason = doubt(row)
            if reason is None:
                sound.append(row)
            else:
                reasons = doubtful.setdefault(Key.of(row).subject, [])
                reasons.append(f"{row.language}/{row.variant}: {reason}")
    races = newest_races(sound)
    races = decisive(races) if state is None else [r for r in races if r.key.state == state]
    measured = {race.key[:4] for race in races if race.key.kind == "measured"}
    rows = [
        replace(_row(race, is_current), doubtful=tuple(doubtful.get(race.key.subject, ())))
        for race in races
        if in_catalog(race) and (race.key.kind == "measured" or race.key[:4] not in measured)
    ]
    return sorted((row for row in rows if fnmatchcase(row.title, problem)), key=_sort_key)


def published(rows: Iterable[Row]) -> list[Row]:
    """The rows that README and the results' pages show: of named problems, or with a peer.

    Other problems were tuned so that calls know more sizes (``kernelcat tune --random``).
    """
    return [row for row in rows if row.problem_name is not None or row.peers]


def in_catalog(race: Race | Past) -> bool:
    """Whether the catalog has the race's entry, with the axes that it had in the race."""
    if race.key.entry not in catalog.names():
        return False
    return race.winner.problem.keys() == set(catalog.entry(race.key.entry).axis_names)


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows with a peer, or all rows if none has a peer: their ``languages`` are comparable."""
    return [row for row in rows if row.peers] or list(rows)


def means(rows: Sequence[Row]) -> Means:
    """Geometric means of the ratios of ``rows``, which should be of one section."""
    shares = [row.roofline for row in rows if row.roofline]
    return Means(
        len(rows),
        _geometric_mean(shares) if shares else None,
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


def _roof(sku: str, dtype: str, flops: int, moved: int) -> tuple[float | None, str]:
    """The roofline's time in microseconds (None for an unknown GPU), and ``Row.bound``."""
    gpu = SKUS.get(sku)
    if gpu is None:
        return None, "compute" if flops > moved else "memory"
    compute, memory = gpu.roofline_us(flops, 0, dtype), gpu.roofline_us(0, moved, dtype)
    return max(compute, memory), "compute" if compute > memory else "memory"


def _geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))


def _mean_by_name(ratios: Iterable[Mapping[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for mapping in ratios:
        for name, ratio in mapping.items():
            by_name.setdefault(name, []).append(ratio)
    return {name: _geometric_mean(values) for name, values in sorted(by_name.items())}


def _sort_key(row: Row) -> tuple[str, str, str, str, int, float, float, str]:
    """Sort key: section, then the problem's work, most first."""
    entry, problem = catalog.entry(row.entry), Problem.of(row.entry, **row.problem)
    work = (-entry.flops(problem), -entry.bytes_moved(problem))
    return *row.section[:4], preference(row.state), *work, row.title
