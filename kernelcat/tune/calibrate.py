"""The command calibrate: time models of entries, fitted and judged by shipped rows.

A model is fitted to some problems and judged on others: each measured problem is served without the
rows of its bucket, once by each rule. The rule that loses least is kept. Rules that ask the model
must lose clearly less than the winner of the nearest problem, which needs no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernelcat.catalog.spec import Entry
from kernelcat.report.calibration import fit, geometric_mean, loss, raced
from kernelcat.report.left_out import LeftOut, left_out
from kernelcat.runtime import gpu as gpus
from kernelcat.store.calibration import NEAREST, RULES, Calibrated, Judgement

MIN_PROBLEMS = 5
"""With fewer measured problems nothing is judged, and the winner of the nearest problem serves."""
MARGIN = 0.01
"""By which a mean loss must be smaller than the loss without a model."""


@dataclass(frozen=True)
class Calibration:
    """The model of an entry, or why it has none."""

    entry: str
    model: Calibrated | None
    why_not: str | None = None


def calibrate(entry: Entry, sku: str) -> Calibration:
    """Fits and judges the model of ``entry`` on ``sku``."""
    gpu, times = gpus.find(sku), raced(entry, sku)
    if len(times) < MIN_PROBLEMS:
        reason = f"{len(times)} measured problems are fewer than {MIN_PROBLEMS}"
        return Calibration(entry.name, None, reason)
    judged = {rule: _judge(left_out(entry, gpu.sku, rule)) for rule in RULES}
    best = min(RULES, key=lambda rule: judged[rule].mean)
    rule = best if judged[best].mean < judged[NEAREST].mean - MARGIN else NEAREST
    return Calibration(entry.name, replace(fit(entry, gpu, times, rule), judged=judged))


def _judge(found: list[LeftOut]) -> Judgement:
    losses = [loss(each.variant_us, each.best_us) for each in found if each.variant_us]
    if not losses:
        return Judgement(0.0, 0.0, 0)
    mean, worst = geometric_mean(losses) - 1, max(losses) - 1
    return Judgement(round(mean, 4), round(worst, 4), len(losses))
