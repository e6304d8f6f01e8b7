"""Calibration: coefficients and a portfolio that follow from measured rows.

The coefficients of an implementation are a least-squares line through the logarithms of measured
over estimated time, of the measured problems and of the random ones that raced. The line is drawn
towards a constant, and the constant towards 1, as if there were a few rows that say so: two rows
must not decide what far larger problems take. A row far from the line counts as one at
:data:`FAR` of it: an estimate knows how many tokens there are, not which sequence has them. Where
inputs are drawn, such rows are left out in the end: what they show is the lengths, which are the
same for all kernels, and a kernel that raced in more such problems is not more doubtful.

The portfolio is what a call chooses from. One that serves the measured problems alone may lack
tiles for sizes that nobody raced; a widened one also serves random problems, whose times are
predicted. It knows measured problems by predictions, too: a call of such a problem has the rows of
its own, and a call of a neighbour chooses by predictions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from hashlib import sha256
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from kernelcat import catalog
from kernelcat.catalog.implementation import NAIVE, Config
from kernelcat.catalog.random_problems import as_called, draw
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.report.portfolio import Table, cover
from kernelcat.report.predictions import Contestant
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import lines, random_races
from kernelcat.store.calibration import CAUTIONS, Calibrated, Coefficients, Member
from kernelcat.verify import receipts

STATE, REGIME = "burst", "graph"
PRIOR_ROWS = 1.0
"""Rows that weigh as much as the belief that an estimate is right."""
FAR, CLIPS = 2.0, 4
"""Greatest factor between the ratio of a row and that of the line, and how often the line is drawn
again with rows that are no farther."""
PRIOR_SLOPE = 3.0
"""Weight, in rows at a distance of e, of the belief that the ratio does not depend on size."""
MAX_PORTFOLIO = 144
"""Configurations that a call predicts at most; each costs some microseconds."""
FEW_ROWS = 10
"""With fewer rows of an implementation, those of a sibling SKU count as well."""
LOST_RACES, NEAR = 10, 1.03
"""An implementation with so many races that took more than ``NEAR`` times the least time in each is
not predicted for random problems: among many predictions the least is often one that errs."""
RANDOM_PROBLEMS, UNUSUAL_PROBLEMS, RANDOM_SEED = 1800, 600, "portfolio"
"""Random problems that a portfolio serves, beside the measured ones, and unusual ones. Dispatch is
judged with other seeds."""
SAMPLED = 20
"""One in so many of these problems, whose estimates a model has a hash of (:func:`sample`)."""

Times = Mapping[Problem, Mapping[Contestant, float]]
"""Problem -> contestant -> microseconds."""


class Point(NamedTuple):
    """A row: the estimate and the measured time in microseconds."""

    estimate_us: float
    us: float


def raced(entry: Entry, sku: str) -> dict[Problem, dict[Contestant, float]]:
    """The shipped rows of ``sku`` that passed, with configurations of today's spaces."""
    return _times(
        entry,
        (
            (row.problem, f"{row.entry}/{row.language}/{row.variant}", row.config, row.median_us)
            for row in lines.shipped()
            if (row.entry, row.gpu, row.regime, row.state) == (entry.name, sku, REGIME, STATE)
        ),
    )


def randomly_raced(entry: Entry, sku: str) -> dict[Problem, dict[Contestant, float]]:
    """The shipped races on random problems of ``sku``, with configurations of today's spaces.

    A race has what was served and what a short tune chose: times where no list of problems has one.
    Their seeds are used up: dispatch is judged with seeds that no model has seen.
    """
    races = random_races.shipped_on(entry.name, sku)
    served = ((race.problem, race.implementation, race.config, race.us) for race in races)
    tuned = ((race.problem, race.tuned, race.tuned_config, race.tuned_us) for race in races)
    return _times(entry, (*served, *tuned))


def _times(
    entry: Entry,
    found: Iterable[tuple[Mapping[str, Any], str | None, Mapping[str, Any] | None, float | None]],
) -> dict[Problem, dict[Contestant, float]]:
    """The times of ``found``: a problem's axes, implementation, configuration, microseconds.

    Left out is what has no time, and what today's entry and spaces no longer have.
    """
    spaces = {i.name: i for i in catalog.implementations(entry.name)}
    times: dict[Problem, dict[Contestant, float]] = {}
    for axes, name, values, us in found:
        if name not in spaces or values is None or not us or set(axes) != set(entry.axis_names):
            continue
        config = Config(values)
        if spaces[name].why_not_in_space(config) is None:
            problem = Problem.of(entry.name, **axes)
            times.setdefault(problem, {})[name, config] = us
    return times


def fit(
    entry: Entry,
    gpu: Gpu,
    times: Times,
    rule: str,
    widened: bool = False,
    caution: float = CAUTIONS[0],
) -> Calibrated:
    """The model of ``entry`` on ``gpu`` that follows from ``times``; it has no judgement yet.

    For implementations with fewer than :data:`FEW_ROWS` rows, those of a sibling SKU count as well,
    one of the same architecture. ``widened`` is whether the portfolio also serves random problems.
    """
    verified = {i.name for i in catalog.implementations(entry.name) if not receipts.doubt(i)}
    table = Table.of(
        [
            {
                each: us
                for each, us in contestants.items()
                if each[0] in verified and _estimate(*each, problem, gpu) is not None
            }
            for problem, contestants in times.items()
        ]
    )
    points = _points(times, gpu)
    for name, more in _random_points(entry.name, gpu).items():
        points[name] = [*points.get(name, ()), *more]
    for name, more in _sibling_points(entry.name, gpu.sku).items():
        if len(points.get(name, ())) < FEW_ROWS:
            points[name] = [*points.get(name, ()), *more]
    is_drawn = any(axis.drawn for axis in entry.axes)
    coefficients = {_short(name): _line(points[name], is_drawn) for name in sorted(points)}
    if widened:
        measured = Table.of([_known_estimates(problem, gpu) for problem in times])
        random, losers = _random_estimates(entry.name, gpu), _losers(entry, gpu, times)
        lines = {name: coefficients[name] for name in coefficients if name not in losers}
        predicted = [_doubted(each, lines, caution) for each in (measured, random)]
        table = reduce(Table.beside, predicted, _naive_winners(table))
    portfolio = cover(table, MAX_PORTFOLIO)
    members = tuple(Member(_short(name), config) for name, config in portfolio)
    estimates = sample(entry.name, gpu) if widened else ""
    return Calibrated(rule, {}, coefficients, members, widened, caution, estimates)


@lru_cache(maxsize=32)  # as _random_estimates
def sample(name: str, gpu: Gpu) -> str:
    """Hash of the estimates of some random problems.

    A widened portfolio follows from the estimates of all of them, which take a minute: where this
    hash is another, so are they.
    """
    lines = [
        f"{problem.key} {implementation} {config.key} {us:.5g}"
        for problem in _random_problems(catalog.entry(name), SAMPLED)
        for (implementation, config), us in _estimates(problem, gpu).items()
    ]
    return sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _doubted(estimates: Table, coefficients: Mapping[str, Coefficients], caution: float) -> Table:
    """The predicted times, raised by their doubt, of implementations that have coefficients."""
    log_us = np.full_like(estimates.log_us, np.inf)
    for name, rows in estimates.implementations():
        line = coefficients.get(_short(name))
        if line is not None:
            log_us[rows] = line.log_predict(estimates.log_us[rows]) + log(line.doubt(caution))
    return Table(estimates.contestants, log_us)


def _losers(entry: Entry, gpu: Gpu, times: Times) -> set[str]:
    """Short names of the implementations that lost clearly in every race, and in many.

    Random races count where two configurations ran, what was served and what a tune chose.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for contestants in (*times.values(), *_contested(entry.name, gpu.sku)):
        best: dict[str, float] = {}
        for (name, _), us in contestants.items():
            best[name] = min(us, best.get(name, us))
        for name, us in best.items():
            ratios[_short(name)].append(us / min(best.values()))
    return {name for name, each in ratios.items() if len(each) >= LOST_RACES and min(each) > NEAR}


@lru_cache(8)  # leaving out each bucket in turn fits again and again
def _contested(name: str, sku: str) -> list[dict[Contestant, float]]:
    """The random races in which two configurations ran."""
    races = randomly_raced(catalog.entry(name), sku).values()
    return [each for each in races if len(each) > 1]


def _naive_winners(table: Table) -> Table:
    """The times of naive variants that are the least of their problems."""
    naive = [number for number, (name, _) in enumerate(table.contestants) if _is_naive(name)]
    least, times = table.log_us.min(axis=0, initial=np.inf), table.log_us[naive]
    won = np.where(times <= least, times, np.inf)
    return Table([table.contestants[number] for number in naive], won)


def _is_naive(name: str) -> bool:
    return name.endswith(f"/{NAIVE}")


def _points(times: Times, gpu: Gpu) -> dict[str, list[Point]]:
    """The rows of each implementation whose configurations are legal today."""
    points: dict[str, list[Point]] = defaultdict(list)
    for problem, contestants in times.items():
        for each, us in contestants.items():
            estimate_us = _estimate(*each, problem, gpu)
            if estimate_us is not None:
                points[each[0]].append(Point(estimate_us, us))
    return points


@lru_cache(maxsize=64)
def _sibling_points(name: str, sku: str) -> dict[str, list[Point]]:
    """The rows of each implementation on a sibling of ``sku``, whose estimates are the sibling's.

    The sibling is the SKU of the same architecture, among those with rows of the implementation,
    whose memory bandwidth is nearest.
    """
    found = dict[str, list[Point]]()
    for sibling in gpus.siblings(gpus.find(sku)):
        found = {**_points(raced(catalog.entry(name), sibling.sku), sibling), **found}
    return found


@lru_cache(maxsize=64)
def _random_points(name: str, gpu: Gpu) -> dict[str, list[Point]]:
    """The shipped rows of each implementation on random problems."""
    return _points(randomly_raced(catalog.entry(name), gpu.sku), gpu)


@lru_cache(maxsize=32)
def _random_estimates(name: str, gpu: Gpu) -> Table:
    """Estimates in microseconds of what is worth a try, for each of a few random problems.

    Naive variants are left out: they are in a portfolio where they won a measured problem. Most of
    them were timed for milliseconds alone, which says nothing about microseconds.
    """
    problems = _random_problems(catalog.entry(name))
    return Table.of([_estimates(problem, gpu) for problem in problems])


def _random_problems(entry: Entry, share: int = 1) -> list[Problem]:
    """The problems that a widened portfolio serves, or the first of them: one in ``share``."""
    if entry.random_problem is None:
        return []
    drawn = draw(entry, RANDOM_SEED, RANDOM_PROBLEMS // share)
    if entry.unusual_problem is not None:
        drawn += draw(entry, RANDOM_SEED, UNUSUAL_PROBLEMS // share, unusual=True)
    return [as_called(entry, problem) for problem in drawn]


def _estimates(problem: Problem, gpu: Gpu) -> dict[Contestant, float]:
    """Estimates in microseconds of what is worth a try for ``problem``.

    Implementations that share a space and what is promising in it are searched once.
    """
    found: dict[Contestant, float] = {}
    promising: dict[Hashable, list[Config]] = {}
    for each in catalog.implementations(problem.entry):
        if not each.serves(gpu.arch) or receipts.doubt(each) or _is_naive(each.name):
            continue
        shared = id(each.space), each.illegal, each.unpromising, each.hopeless
        if shared not in promising:
            promising[shared] = list(each.promising(problem, gpu))
        for config in promising[shared]:
            if each.too_slow(config, problem, gpu) is None:
                found[each.name, config] = each.estimate(problem, config, gpu)
    return found


_known_estimates = lru_cache(maxsize=1024)(_estimates)
"""Each measured problem is asked for again and again, where fits leave out a bucket each."""


@lru_cache(maxsize=1 << 14)
def _estimate(name: str, config: Config, problem: Problem, gpu: Gpu) -> float | None:
    """The estimate in microseconds, or None where the configuration is not legal."""
    implementation = catalog.implementation(*name.split("/"))
    if implementation.why_not(config, problem, gpu) is not None:
        return None
    return implementation.estimate(problem, config, gpu)


def _short(name: str) -> str:
    """``gemm/cuda/wgmma`` -> ``cuda/wgmma``."""
    return name.split("/", 1)[1]


def _line(points: Sequence[Point], is_drawn: bool = False) -> Coefficients:
    """Coefficients from rows, at least one. ``is_drawn``: inputs have what no call tells, and rows
    that are far from the line are left out in the end."""
    estimates = np.log([point.estimate_us for point in points])
    ratios = np.log([point.us for point in points]) - estimates
    center = float(estimates.mean())
    matrix = np.column_stack((np.ones(len(points)), estimates - center))
    prior = np.diag(np.sqrt([PRIOR_ROWS, PRIOR_SLOPE**2]))
    system, near = np.vstack((matrix, prior)), ratios
    for _ in range(CLIPS + 1):
        solution = np.linalg.lstsq(system, np.append(near, (0, 0)), rcond=None)[0]
        line = matrix @ solution
        near = np.clip(ratios, line - log(FAR), line + log(FAR))
    errors = near - line
    foreseen = np.abs(ratios - line) <= log(FAR)
    if is_drawn and foreseen.any():
        rows = np.append(foreseen, (True, True))
        solution = np.linalg.lstsq(system[rows], np.append(ratios, (0, 0))[rows], rcond=None)[0]
        errors = (ratios - matrix @ solution)[foreseen]
    numbers = {
        "factor": exp(solution[0]),
        "slope": float(solution[1]),
        "low_us": exp(estimates.min()),
        "center_us": exp(center),
        "high_us": exp(estimates.max()),
        "spread": exp(float(np.sqrt((errors**2).mean()))),
    }
    rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    return Coefficients(**rounded, rows=len(points))


def loss(us: float | None, best_us: float) -> float:
    """``us`` over ``best_us``; 1 where there is no time."""
    return us / best_us if us else 1.0


def geometric_mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))
