"""Dispatch judged by rows of the database, without a GPU.

Each measured problem is served without the rows of its bucket, as if nobody had tuned it. The rows
that were left out then say how good the choice is. Most of what is chosen was not raced for the
problem, because only finalists race. So there are three measures: of the variant, with its best
raced configuration; of the very configuration, where it raced; and of the configuration in any
case, where what did not race takes the variant's best time times the ratio of both estimates.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from kernelcat.call.calibrated import predictions
from kernelcat.call.choice import Decision, choose
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.random_problems import as_called
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import Unsupported
from kernelcat.report.calibration import (
    REGIME,
    STATE,
    Times,
    fit,
    geometric_mean,
    loss,
    raced,
)
from kernelcat.report.sheet import Sheet
from kernelcat.runtime import gpu as gpus
from kernelcat.store import calibration, lines, random_races, snapshot
from kernelcat.store.calibration import Calibrated

BY_NEAREST = ("nearest", "borrowed nearest", "default")
"""Why something serves where no model does, and nothing of the bucket."""


@dataclass(frozen=True)
class LeftOut:
    """What serves one problem without the rows of its bucket; times in microseconds.

    Attributes
    ----------
    problem : name or description
    implementation, why : what serves, and why; None where nothing does
    best_us : of the fastest row that was left out
    variant_us : of the fastest such row of ``implementation``, or None
    us : of the row with the configuration that serves, or None where that did not race
    likely_us : ``us``, or else ``variant_us`` times the ratio of estimates, at least ``best_us``
    """

    problem: str
    implementation: str | None
    why: str | None
    best_us: float
    variant_us: float | None
    us: float | None
    likely_us: float | None = None


class Rows:
    """The shipped rows of an entry on one GPU, which can be left out bucket by bucket.

    Models that are fitted without a bucket are kept: all rules ask the same ones.
    """

    def __init__(self, entry: Entry, sku: str) -> None:
        self.entry, self.gpu = entry, gpus.find(sku)
        self.times: Times = raced(entry, sku)
        self._choices = snapshot().choices(entry.name)
        self._models: dict[tuple[Hashable, bool, float], Calibrated] = {}

    def judge(
        self, rule: str, widened: bool, caution: float = calibration.CAUTIONS[0]
    ) -> list[LeftOut]:
        """What ``rule`` serves each measured problem without the rows of its bucket.

        ``widened`` and ``caution`` are those of the model, see :class:`Calibrated`.
        """
        found = []
        for problem, times in self.times.items():
            bucket, axes = self.entry.bucket(problem), problem.values.keys()
            models = {}
            if rule != calibration.NEAREST:
                models[self.entry.name] = replace(
                    self._without(bucket, widened, caution), rule=rule
                )
            others = [
                choice
                for choice in self._choices
                if choice.problem.values.keys() == axes
                and self.entry.bucket(choice.problem) != bucket
            ]
            name, best_us = self.entry.problem_name(problem) or str(problem), min(times.values())
            try:
                decision = choose(self.entry, problem, self.gpu, others, models=models)
            except Unsupported:
                found.append(LeftOut(name, None, None, best_us, None, None))
                continue
            served = decision.implementation.name
            of_variant = {config: us for (owner, config), us in times.items() if owner == served}
            us = of_variant.get(decision.config)
            variant_us = min(of_variant.values(), default=None)
            likely_us = us
            if us is None and variant_us is not None:
                fastest = min(of_variant, key=lambda config: of_variant[config])
                ratio = self._estimated(decision, fastest, problem)
                likely_us = max(variant_us * ratio, best_us)
            found.append(LeftOut(name, served, decision.why, best_us, variant_us, us, likely_us))
        return found

    def promised(self, model: Calibrated) -> list[float]:
        """What ``model`` predicts for random races, over the time of what served there.

        Of races that no model and no row of the bucket has served.
        """
        ratios, axes = [], set(self.entry.axis_names)
        for race in random_races.shipped_on(self.entry.name, self.gpu.sku):
            if race.why in BY_NEAREST and race.us and set(race.problem) == axes:
                problem = as_called(self.entry, self.entry.problem(**race.problem))
                found = predictions(model, problem, self.gpu, lambda language, variant: True)
                ratios += [each.us / race.us for each in found[:1]]
        return ratios

    def _estimated(self, decision: Decision, raced: Config, problem: Problem) -> float:
        """The estimate of what serves over that of another configuration of its variant."""
        estimate = decision.implementation.estimate
        return estimate(problem, decision.config, self.gpu) / estimate(problem, raced, self.gpu)

    def _without(self, bucket: Hashable, widened: bool, caution: float) -> Calibrated:
        """The model that follows from the rows of all other buckets."""
        key = (bucket, widened, caution)
        if key not in self._models:
            rest = {p: each for p, each in self.times.items() if self.entry.bucket(p) != bucket}
            self._models[key] = fit(self.entry, self.gpu, rest, calibration.MODEL, widened, caution)
        return self._models[key]


def left_out(entry: Entry, sku: str) -> list[LeftOut]:
    """What the rule of the entry's shipped model serves: one result for each measured problem.

    The model is fitted anew without the rows that are left out.
    """
    shipped = calibration.models(sku).get(entry.name)
    if shipped is None:
        return Rows(entry, sku).judge(calibration.NEAREST, False)
    return Rows(entry, sku).judge(shipped.rule, shipped.widened, shipped.caution)


def skus(entry: Entry) -> list[str]:
    """The GPUs of which ``entry`` has shipped rows."""
    return sorted({row.gpu for row in lines.shipped() if row.entry == entry.name})


def sheet(entry: str, sku: str, found: Sequence[LeftOut]) -> Sheet:
    """The table of ``found``, the largest losses first."""
    ordered = sorted(found, key=lambda each: -loss(each.variant_us, each.best_us))
    variants = [loss(each.variant_us, each.best_us) for each in found if each.variant_us]
    configs = [loss(each.us, each.best_us) for each in found if each.us]
    return Sheet(
        f"{entry} on {sku}, each problem without the rows of its bucket",
        ("problem", "served by", "why", "best µs", "variant's best µs", "served µs"),
        [
            (
                each.problem,
                (each.implementation or "nothing").removeprefix(f"{entry}/"),
                each.why or "",
                *("" if us is None else f"{us:.1f}" for us in (each.best_us, each.variant_us)),
                "" if each.us is None else f"{each.us:.1f}",
            )
            for each in ordered
        ],
        [
            f"Regret of the variant, with its best raced configuration: {_mean(variants)}.",
            f"Regret of the configuration, where it raced: {_mean(configs)}.",
            f"Rows of the {REGIME} regime, {STATE}. An empty time: it did not race.",
        ],
        slice(3, None),
    )


def _mean(losses: list[float]) -> str:
    if not losses:
        return "none raced"
    mean, worst = geometric_mean(losses) - 1, max(losses) - 1
    return f"{mean:.1%} in the mean of {len(losses)}, {worst:.1%} at worst"
