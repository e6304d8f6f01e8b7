"""The distribution of a race's samples: the winner's and those of its fastest peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kernelcat.report.board import Row
from kernelcat.report.grid import figure
from kernelcat.report.sheet import Sheet
from kernelcat.report.site import plots
from kernelcat.report.site.markup import sheet
from kernelcat.store import Measurement
from kernelcat.store.measurement import canonical

MAX_PROBLEMS = 12
"""The plot shows the first so many problems, which have most work; the table has all."""


def spread_part(number: int, rows: Sequence[Row], races: Sequence[Measurement]) -> str:
    """A plot and a table of the samples behind ``rows``, the lines of one section of the board.

    ``races`` are rows of all races. Empty where no sample is stored: old rows have none.
    """
    stored: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for each in races:
        if each.quantiles_us and (each.gpu, each.regime, each.state) == _conditions(rows[0]):
            stored[each.run, each.problem_key].append(each)
    pairs = [
        (row, found)
        for row in rows
        if (found := _contestants(row, stored.get((row.run, canonical(row.problem)), [])))
    ]
    if not pairs:
        return ""
    groups = [
        (row.title, [(_name(each), each.quantiles_us or (), each.is_peer) for each in found])
        for row, found in pairs[:MAX_PROBLEMS]
    ]
    more = len(pairs) - len(groups)
    rest = f" {more} more problems stand in the table alone." if more else ""
    plot = plots.strips(
        "Distribution of the samples", groups,
        "Each mark is a sample, or a quantile of many; each problem has its own scale in \u00b5s. "
        f"Upper strip: the winner. Lower strip: its fastest peer.{rest}",
    )  # fmt: skip
    listed = [each for _, found in pairs for each in found]
    return plot + sheet(f"spread{number}", _sheet(rows[0], listed))


def _conditions(row: Row) -> tuple[str, str, str]:
    return row.gpu, row.regime, row.state


def _contestants(row: Row, race: Sequence[Measurement]) -> list[Measurement]:
    """The winner of ``row`` and its fastest peer, of the rows of its race with samples."""
    winner = (row.language, row.variant, row.config)
    ours = [r for r in race if (r.language, r.variant, r.config) == winner]
    peers = sorted((r for r in race if r.is_peer), key=lambda each: each.median_us or 0)
    return ours[:1] + peers[:1] if ours else []


def _name(row: Measurement) -> str:
    return row.variant if row.is_peer else f"{row.language}/{row.variant}"


def _sheet(first: Row, rows: Sequence[Measurement]) -> Sheet:
    headers = ("problem", "contestant", "samples", "least", "lower quarter", "median",
               "upper quarter", "largest", "largest over median")  # fmt: skip
    lines = [
        (
            row.problem_name or " ".join(f"{k}={v}" for k, v in row.problem.items()),
            _name(row),
            str(row.samples),
            *(figure(row.quantiles_us[round(share * (len(row.quantiles_us) - 1))])
              for share in (0, 0.25, 0.5, 0.75, 1)),
            f"{row.quantiles_us[-1] / row.quantiles_us[len(row.quantiles_us) // 2]:.3f}",
        )
        for row in rows
        if row.quantiles_us
    ]  # fmt: skip
    title = f"Samples in µs, {first.gpu}, {first.regime} regime, {first.state}"
    return Sheet(title, headers, lines, (), slice(2, None))
