"""Calibration: coefficients and a portfolio that follow from measured rows.

The coefficients of an implementation are a least-squares line through the logarithms of measured
over estimated time. The line is drawn towards a constant, and the constant towards 1, as if there
were a few rows that say so: two rows must not decide what far larger problems take.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import exp, log

import numpy as np

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import lines
from kernelcat.store.calibration import Calibrated, Coefficients, Member
from kernelcat.verify import receipts

STATE, REGIME = "burst", "graph"
PRIOR_ROWS = 1.0
"""Rows that weigh as much as the belief that an estimate is right."""
PRIOR_SLOPE = 3.0
"""Weight, in rows at a distance of e, of the belief that the ratio does not depend on size."""
MAX_PORTFOLIO = 32
"""Configurations that a call predicts at most; each costs some microseconds."""

Contestant = tuple[str, Config]
"""Name of an implementation, and a configuration."""
Times = Mapping[Problem, Mapping[Contestant, float]]
"""Problem -> contestant -> microseconds."""


def raced(entry: Entry, sku: str) -> dict[Problem, dict[Contestant, float]]:
    """The shipped rows of ``sku`` that passed, with configurations of today's spaces."""
    spaces = {i.name: i for i in catalog.implementations(entry.name)}
    times: dict[Problem, dict[Contestant, float]] = {}
    for row in lines.shipped():
        if (row.entry, row.gpu, row.regime, row.state) != (entry.name, sku, REGIME, STATE):
            continue
        name, config = f"{row.entry}/{row.language}/{row.variant}", Config(row.config)
        is_known = name in spaces and spaces[name].why_not_in_space(config) is None
        if is_known and row.median_us and set(row.problem) == set(entry.axis_names):
            problem = Problem.of(entry.name, **row.problem)
            times.setdefault(problem, {})[name, config] = row.median_us
    return times


def fit(entry: Entry, gpu: Gpu, times: Times, rule: str) -> Calibrated:
    """The model of ``entry`` on ``gpu`` that follows from ``times``; it has no judgement yet.

    The portfolio has the fastest verified configuration of each problem, the most frequent ones
    first. So its regret over the measured problems is least, as long as they have no more than
    :data:`MAX_PORTFOLIO` different ones.
    """
    verified = {i.name for i in catalog.implementations(entry.name) if not receipts.doubt(i)}
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    wins: Counter[Contestant] = Counter()
    for problem, contestants in times.items():
        legal = {}
        for each, us in contestants.items():
            estimate_us = _estimate(*each, problem, gpu)
            if estimate_us is not None:
                legal[each] = us
                points[each[0]].append((estimate_us, us))
        legal = {each: us for each, us in legal.items() if each[0] in verified}
        if legal:
            wins[min(legal, key=lambda each: (legal[each], each[0], each[1].key))] += 1
    ordered = sorted(wins, key=lambda each: (-wins[each], each[0], each[1].key))
    return Calibrated(
        rule,
        {},
        {_short(name): _line(points[name]) for name in sorted(points)},
        tuple(Member(_short(name), config) for name, config in ordered[:MAX_PORTFOLIO]),
    )


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


def _line(points: list[tuple[float, float]]) -> Coefficients:
    """Coefficients from (estimate, time) pairs, at least one."""
    estimates = np.log([estimate for estimate, _ in points])
    ratios = np.log([us for _, us in points]) - estimates
    center = float(estimates.mean())
    matrix = np.column_stack((np.ones(len(points)), estimates - center))
    prior = np.diag(np.sqrt([PRIOR_ROWS, PRIOR_SLOPE**2]))
    solution = np.linalg.lstsq(np.vstack((matrix, prior)), np.append(ratios, (0, 0)), rcond=None)[0]
    errors = ratios - matrix @ solution
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
