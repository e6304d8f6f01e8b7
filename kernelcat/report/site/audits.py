"""Audits: the order that cost models predict, and what tunes choose, against what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from kernelcat.report import audits, predictions
from kernelcat.report.site.markup import sheet, text
from kernelcat.store.audits import Audit

_PREDICTED = (
    "The cost model's order of the configurations that raced, against their measured order. "
    "Spearman's rank correlation is 1 for equal orders. Best of K: the time of the fastest of the "
    "first K by estimate, over that of the fastest of all; a race counts where more than K ran."
)
_NO_TUNES = (
    "No audit of tunes (kernelcat tune ENTRY --audit), which compares a tune's choice with the "
    "whole legal space, is among these results."
)


def entry_part(predicted: Sequence[predictions.Audit], tunes: Sequence[Audit]) -> str:
    """The audits of one entry; empty without any."""
    parts = []
    judged = [each for each in predicted if each.races]
    if judged:
        parts.append(
            f"<h2>Predicted order against measured order</h2>\n<p>{text(_PREDICTED)}</p>\n"
        )
    for i, each in enumerate(judged):
        parts.append(sheet(f"predicted{i}", predictions.races_sheet(each), folded=True))
    return "".join(parts) + _tunes(tunes)


def overview_part(predicted: Sequence[predictions.Audit], tunes: Sequence[Audit]) -> str:
    """A table of all entries for each GPU, and the audits of tunes."""
    parts = ["<h2>How good predictions are</h2>\n"]
    for i, gpu in enumerate(sorted({each.gpu for each in predicted if each.races})):
        listed = [each for each in predicted if each.gpu == gpu]
        parts.append(sheet(f"predicted{i}", predictions.sheet(gpu, listed)))
    if len(parts) == 1:
        parts.append("<p>No race has enough configurations to judge a prediction.</p>\n")
    parts.append(_tunes(tunes) or f"<h2>How good tunes choose</h2>\n<p>{text(_NO_TUNES)}</p>\n")
    return "".join(parts)


def _tunes(tunes: Sequence[Audit]) -> str:
    parts = ["<h2>How good tunes choose</h2>\n"] if tunes else []
    parts += [sheet(f"tunes{i}", audits.sheet(each)) for i, each in enumerate(tunes)]
    return "".join(parts)
