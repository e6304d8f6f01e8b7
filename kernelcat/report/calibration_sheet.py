"""The table of calibrated models: what each rule loses, and which one serves."""

from __future__ import annotations

from collections.abc import Mapping

from kernelcat.report.sheet import Sheet
from kernelcat.store.calibration import RULES, Calibrated

HEADERS = ("entry", "problems", *RULES, "serves", "portfolio", "caution", "spread")


def sheet(sku: str, models: Mapping[str, Calibrated]) -> Sheet:
    """One line for each entry."""
    return Sheet(
        f"Calibrated models of the {sku}",
        HEADERS,
        [_line(name, models[name]) for name in sorted(models)],
        [
            "What a rule loses on problems whose buckets were left out of rows and fit: geometric "
            "mean of the chosen variant's best time over the fastest, in parentheses the worst.",
            "Spread: by which factor measured times differ from predictions, the middle of all "
            "implementations (fitted rows, so too small).",
            "+: the portfolio also serves random problems. Caution: standard deviations by which a "
            "predicted time is raised before it is compared.",
        ],
        slice(1, None),
    )


def _line(name: str, model: Calibrated) -> tuple[str, ...]:
    spreads = sorted(each.spread for each in model.coefficients.values())
    return (
        name,
        str(max(each.problems for each in model.judged.values())),
        *(f"{model.judged[r].mean:.1%} ({model.judged[r].worst:.0%})" for r in RULES),
        model.rule,
        f"{len(model.portfolio)}{'+' if model.widened else ''}",
        f"{model.caution:g}",
        f"{spreads[len(spreads) // 2]:.2f}",
    )
