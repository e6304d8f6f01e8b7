"""Cost models judged by races: the predicted order of configurations against the measured order.

A race is judged if it ran at least :data:`MIN_CONFIGS` different configurations that are legal
today. Its rows are those of one run, so that they may be compared with each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import correlation, mean

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.report.sheet import Sheet
from kernelcat.runtime import gpu as gpus
from kernelcat.store import audits as tunes
from kernelcat.store.measurement import Measurement
from kernelcat.store.races import BURST, SCREEN

REGIME, L2 = "graph", "cold"
MIN_CONFIGS = 3
"""With fewer configurations an order says nothing."""
BEST_OF = (1, 4, 16)
"""Numbers of configurations, first by estimate, of which the fastest counts."""

Contestant = tuple[str, Config]
"""Name of an implementation, and a configuration."""


@dataclass(frozen=True)
class Judged:
    """One race against the cost model.

    Attributes
    ----------
    problem : name or description
    configs : number of configurations that raced
    spearman : rank correlation of estimates and times, from -1 to 1; 0 for equal estimates
    regret
        K of :data:`BEST_OF` -> time of the fastest of the first K configurations by estimate, over
        that of the fastest of all. K is missing where the race had no more than K configurations:
        it would be 1 whatever the model says.
    """

    problem: str
    configs: int
    spearman: float
    regret: Mapping[int, float]


@dataclass(frozen=True)
class Audit:
    """The races of one entry on one GPU against the cost models; ``skipped`` had too few."""

    entry: str
    gpu: str
    races: tuple[Judged, ...]
    skipped: int

    @property
    def spearman(self) -> float | None:
        """Mean over the races, or None without one."""
        return mean(race.spearman for race in self.races) if self.races else None

    def regrets(self, best_of: int) -> list[float]:
        """The regrets of the races with more than ``best_of`` configurations."""
        return [race.regret[best_of] for race in self.races if best_of in race.regret]


Estimate = Callable[[Problem, str, Config], float]
"""Microseconds of a configuration of an implementation, by a model."""


def audit(
    entry: Entry,
    sku: str,
    measured: Mapping[Problem, Mapping[Contestant, float]],
    model: Estimate | None = None,
) -> Audit:
    """Judges a model by times on the GPU ``sku``; the cost models of ``entry`` by default.

    ``measured`` is what :func:`races_of` or :func:`whole_spaces` returns.
    """
    gpu = gpus.find(sku)
    by_name = {i.name: i for i in catalog.implementations(entry.name)}

    def of_entry(problem: Problem, name: str, config: Config) -> float:
        return by_name[name].estimate(problem, config, gpu)

    estimate, races, skipped = model or of_entry, [], 0
    for problem, times in measured.items():
        estimates = {
            (name, config): estimate(problem, name, config)
            for name, config in times
            if by_name[name].why_not(config, problem, gpu) is None
        }
        if len(estimates) < MIN_CONFIGS:
            skipped += 1
            continue
        pairs = [(us, times[contestant]) for contestant, us in estimates.items()]
        races.append(judge(entry.problem_name(problem) or str(problem), pairs))
    return Audit(entry.name, gpu.sku, tuple(sorted(races, key=lambda r: r.problem)), skipped)


def races_of(
    entry: Entry, sku: str, rows: Iterable[Measurement], state: str = BURST
) -> dict[Problem, dict[Contestant, float]]:
    """Problem -> contestant -> microseconds in the newest run that raced the problem.

    ``state`` is that of the rows: one of ``store.STATES``, or ``screen``. Only implementations and
    axes of today; the regime is ``graph``, and L2 is cold.
    """
    known = {i.name: i for i in catalog.implementations(entry.name)}
    protocol = {"regime": REGIME, "state": state, "l2": L2}
    runs: dict[Problem, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if (
            (row.entry, row.gpu, row.kind, row.status) == (entry.name, sku, "measured", "passed")
            and row.protocol.items() >= protocol.items()
            and _name(row) in known
            and set(row.problem) == set(entry.axis_names)
        ):
            runs[row.to_problem()][row.run].append(row)
    races = {}
    for problem, by_run in runs.items():
        newest = max(by_run, key=lambda run: max(row.created_at for row in by_run[run]))
        ordered = sorted(by_run[newest], key=lambda row: row.created_at)
        races[problem] = {
            (_name(row), row.to_config()): row.median_us
            for row in ordered
            if row.median_us is not None
            and known[_name(row)].why_not_in_space(row.to_config()) is None
        }
    return {problem: times for problem, times in races.items() if times}


def whole_spaces(
    entry: Entry, sku: str, audits: Iterable[tunes.Audit]
) -> dict[Problem, dict[Contestant, float]]:
    """Problem -> contestant -> microseconds in screening, of all legal configurations.

    They are of the newest of ``audits`` that has the problem. Only implementations and axes of
    today.
    """
    known = {i.name: i for i in catalog.implementations(entry.name)}
    found: dict[Problem, dict[Contestant, float]] = {}
    for each in sorted(audits, key=lambda each: each.created_at):
        if (each.entry, each.gpu, each.regime) == (entry.name, sku, REGIME):
            for problem in each.problems:
                if problem.times and set(problem.problem) == set(entry.axis_names):
                    found[entry.problem(**problem.problem)] = {
                        (name, config): us
                        for name, table in problem.times.items()
                        for config, us in table.times().items()
                        if name in known and known[name].why_not_in_space(config) is None
                    }
    return found


def _name(row: Measurement) -> str:
    return f"{row.entry}/{row.language}/{row.variant}"


def judge(problem: str, pairs: Sequence[tuple[float, float]]) -> Judged:
    """Judges a race by its (estimate, time) pairs; a tie of estimates counts as the worst order."""
    ordered = sorted(pairs, key=lambda pair: (pair[0], -pair[1]))
    fastest = min(us for _, us in pairs)
    regret = {
        count: min(us for _, us in ordered[:count]) / fastest
        for count in BEST_OF
        if len(pairs) > count
    }
    return Judged(problem, len(pairs), spearman(*zip(*pairs, strict=True)), regret)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank. 0 if all are equal."""
    if len(set(first)) == 1 or len(set(second)) == 1:
        return 0.0
    return correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def sheet(sku: str, audits: Sequence[Audit], state: str = BURST) -> Sheet:
    """The table with a line for each entry that was judged, worst order first."""
    judged = [each for each in audits if each.races]
    judged.sort(key=lambda each: (each.spearman or 0.0, each.entry))
    counts = _judged_counts(judged)
    regrets = [head for count in counts for head in (f"best of {count}", "at worst", "races")]
    rest = [each.entry for each in audits if not each.races]
    notes = [
        f"Estimates of the cost models against races on the {sku} ({REGIME}, {state}, L2 {L2}).",
        "Spearman is the mean over races. Regret is the geometric mean, then the worst, of the "
        "fastest of the first K configurations by estimate over the fastest of the race; a race "
        "counts where more than K configurations ran.",
    ]
    if rest:
        notes.append(f"No race with {MIN_CONFIGS} configurations: {', '.join(rest)}.")
    return Sheet(
        f"Predicted order on the {sku}",
        ("entry", "races", "configurations", "Spearman", *regrets),
        [_line(each, counts) for each in judged],
        notes,
        slice(1, None),
    )


def models_sheet(judged: Mapping[str, Audit]) -> Sheet:
    """The table that compares models, by their names, on the same races."""
    counts = _judged_counts([*judged.values()])
    regrets = [head for count in counts for head in (f"best of {count}", "at worst", "races")]
    first = next(iter(judged.values()))
    return Sheet(
        f"Models of {first.entry} on the {first.gpu}",
        ("model", "races", "configurations", "Spearman", *regrets),
        [_line(replace(each, entry=name), counts) for name, each in judged.items() if each.races],
        ["The same configurations of the same races, those that all of the models can describe."],
        slice(1, None),
    )


def _judged_counts(audits: Sequence[Audit]) -> list[int]:
    """The numbers of :data:`BEST_OF` for which a race had enough configurations."""
    return [count for count in BEST_OF if any(each.regrets(count) for each in audits)]


def _line(each: Audit, counts: Sequence[int]) -> tuple[str, ...]:
    cells = [each.entry, str(len(each.races))]
    sizes = [race.configs for race in each.races]
    cells += [f"{min(sizes)} to {max(sizes)}", f"{each.spearman:.2f}"]
    for count in counts:
        regrets = each.regrets(count)
        cells += [*_regret(regrets), str(len(regrets))]
    return tuple(cells)


def _regret(regrets: Sequence[float]) -> tuple[str, str]:
    if not regrets:
        return "", ""
    return f"{exp(mean(map(log, regrets))):.2f}", f"{max(regrets):.2f}"


def races_sheet(each: Audit) -> Sheet:
    """The table of one entry, a line for each race, worst order first."""
    ordered = sorted(each.races, key=lambda race: (race.spearman, race.problem))
    counts = _judged_counts([each])
    return Sheet(
        f"{each.entry} on the {each.gpu}",
        ("problem", "configurations", "Spearman", *(f"best of {count}" for count in counts)),
        [
            (race.problem, str(race.configs), f"{race.spearman:.2f}",
             *(f"{race.regret[k]:.2f}" if k in race.regret else "" for k in counts))
            for race in ordered
        ],
        [f"{each.skipped} races had fewer than {MIN_CONFIGS} configurations that are legal today."],
        slice(1, None),
    )  # fmt: skip


TITLE = "# Predicted order against measured order"
FINALISTS = (
    "Shipped races have finalists only, mostly one configuration of each variant. So these numbers "
    "judge the choice between variants."
)
WHOLE_SPACES = (
    "Audits of tunes have times of every legal configuration, each measured once and for a short "
    "time (`kernelcat predict --audit --state screen`). These judge the choice between all "
    "configurations."
)
NO_WHOLE_SPACE = (
    "Whether the best of 16 among all configurations is good is not judged: that needs times of "
    "whole spaces, which `kernelcat tune ENTRY --audit --out FILE` measures, and no such file "
    "comes with the package."
)
MADE = "<!-- Made by make readme from tuning_db/ and the cost models: change those, not this. -->"


def markdown(skus: Sequence[str], rows: Sequence[Measurement]) -> str:
    """The page ``docs/predictions.md``: a table for each GPU of which ``rows`` has races."""
    parts = [TITLE, MADE]
    entries = [catalog.entry(name) for name in catalog.names()]
    for sku in skus:
        raced = [audit(entry, sku, races_of(entry, sku, rows)) for entry in entries]
        table = sheet(sku, raced).markdown("kernelcat predict --audit")
        parts += [f"## {gpus.find(sku).name}", FINALISTS, table]
        screened = [audit(e, sku, whole_spaces(e, sku, tunes.shipped(e.name))) for e in entries]
        if any(each.races for each in screened):
            table = sheet(sku, screened, SCREEN).markdown(
                "kernelcat predict --audit --state screen"
            )
            parts += ["### Whole spaces", WHOLE_SPACES, table]
        else:
            parts.append(NO_WHOLE_SPACE)
    return "\n\n".join(parts)
