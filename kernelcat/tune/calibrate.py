"""The command calibrate: time models of entries, fitted and judged by shipped rows.

A model is fitted to some problems and judged on others: each measured problem is served without the
rows of its bucket, once by each rule. The rule that loses least is kept. Rules that ask the model
must lose less than the winner of the nearest problem, which needs no model; clearly less if the
portfolio knows measured problems only. Of two such rules a widened portfolio has the one that
likely loses less. A portfolio that also serves random problems is kept unless it loses clearly more
on the measured ones, and a model has the caution with which it likely loses least: where the chosen
configuration has not raced, by its estimate.

What a choice loses is its variant's best raced time over the fastest, which flatters the nearest
winner: its configuration is one for other sizes. So where that winner seems to lose less, and
estimates of the configurations say otherwise, random races decide that it has served: the model's
rule is kept if the model predicts to have been faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from kernelcat.catalog.spec import Entry
from kernelcat.report.calibration import fit, geometric_mean, loss
from kernelcat.report.left_out import LeftOut, Rows
from kernelcat.store.calibration import CAUTIONS, NEAREST, RULES, Calibrated, Judgement

MIN_PROBLEMS = 5
"""With fewer measured problems nothing is judged, and the winner of the nearest problem serves."""
MARGIN = 0.01
"""By which a mean loss must be smaller than the loss without a model, where the portfolio knows the
measured problems only. With a widened one a smaller loss is enough: losses are of variants, and the
nearest winner's configuration is one for other sizes (docs/decisions.md)."""
WIDENED_MARGIN = 0.03
"""By which a portfolio that also serves random problems may lose more on measured ones: calls of
measured problems have rows of their own, and a chosen configuration that was not raced counts as
its variant's best raced one."""
MIN_RACES = 5
"""With fewer random races that the nearest winner has served, they do not decide."""


@dataclass(frozen=True)
class Calibration:
    """The model of an entry, or why it has none."""

    entry: str
    model: Calibrated | None
    why_not: str | None = None


@dataclass(frozen=True)
class _Judged:
    """How a model is fitted, and what the rules lose with it.

    Attributes
    ----------
    widened, caution : as of :class:`Calibrated`
    found : rule -> what serves each measured problem
    """

    widened: bool
    caution: float
    found: Mapping[str, list[LeftOut]]

    @cached_property
    def losses(self) -> dict[str, Judgement]:
        return {rule: _judge(each) for rule, each in self.found.items()}

    @property
    def least(self) -> float:
        """The mean loss of the rule that loses least."""
        return min(each.mean for each in self.losses.values())

    @property
    def likely_of_models(self) -> float:
        """The least likely loss of the rules that ask the model."""
        return min(_likely(each) for rule, each in self.found.items() if rule != NEAREST)

    @property
    def best_of_models(self) -> str:
        """The rule that asks the model and loses least: likely, where it serves random problems."""
        asking = [rule for rule in RULES if rule != NEAREST]
        if self.widened:
            return min(asking, key=lambda rule: _likely(self.found[rule]))
        return min(asking, key=lambda rule: self.losses[rule].mean)


def calibrate(entry: Entry, sku: str) -> Calibration:
    """Fits and judges the model of ``entry`` on ``sku``."""
    rows = Rows(entry, sku)
    if len(rows.times) < MIN_PROBLEMS:
        reason = f"{len(rows.times)} measured problems are fewer than {MIN_PROBLEMS}"
        return Calibration(entry.name, None, reason)
    nearest = rows.judge(NEAREST, False)

    def judged(widened: bool, caution: float) -> _Judged:
        asking = {r: rows.judge(r, widened, caution) for r in RULES if r != NEAREST}
        return _Judged(widened, caution, {NEAREST: nearest, **asking})

    def widest(caution: float) -> _Judged:
        narrow = judged(False, caution)
        if entry.random_problem is None:
            return narrow
        wide = judged(True, caution)
        return wide if wide.least <= narrow.least + WIDENED_MARGIN else narrow

    kept = min((widest(caution) for caution in CAUTIONS), key=lambda each: each.likely_of_models)
    losses, best = kept.losses, kept.best_of_models
    margin = 0.0 if kept.widened else MARGIN
    rule = best if losses[best].mean < losses[NEAREST].mean - margin else NEAREST
    model = fit(entry, rows.gpu, rows.times, rule, kept.widened, kept.caution)
    if rule == NEAREST and kept.widened:
        likely = {each: _likely(kept.found[each]) for each in RULES}
        best = min(RULES, key=lambda each: likely[each])
        if likely[best] < likely[NEAREST] and _promises(rows, model):
            model = replace(model, rule=best)
    return Calibration(entry.name, replace(model, judged=losses))


def _likely(found: list[LeftOut]) -> float:
    """The mean loss where what did not race takes the time that estimates give it."""
    losses = [loss(each.likely_us, each.best_us) for each in found if each.likely_us]
    return geometric_mean(losses) if losses else 1.0


def _promises(rows: Rows, model: Calibrated) -> bool:
    """Whether ``model`` predicts to be faster than the nearest winner was in random races."""
    ratios = rows.promised(model)
    return len(ratios) >= MIN_RACES and geometric_mean(ratios) < 1


def _judge(found: list[LeftOut]) -> Judgement:
    losses = [loss(each.variant_us, each.best_us) for each in found if each.variant_us]
    if not losses:
        return Judgement(0.0, 0.0, 0)
    mean, worst = geometric_mean(losses) - 1, max(losses) - 1
    return Judgement(round(mean, 4), round(worst, 4), len(losses))
