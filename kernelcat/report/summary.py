"""One line for each entry: how its winners compare with the fastest peers, on one GPU.

An entry that this GPU has not raced shows another one's results, with its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from kernelcat import catalog
from kernelcat.report.board import Row, board, published
from kernelcat.report.grid import STALE, ratio
from kernelcat.store import Measurement


@dataclass(frozen=True)
class Summary:
    """The ratios of an entry on a GPU: time of the fastest peer over time of the winner.

    Attributes
    ----------
    gpu : SKU
    num_problems : problems that were measured, with or without a peer
    ratios : problem -> ratio, above 1 where the winner is faster; only problems with a peer
    peers : peers by the number of problems in which they are the fastest, most first
    days : first and last day of the measurements (``2026-11-21``)
    is_stale : whether a winner runs other code today
    """

    entry: str
    gpu: str
    num_problems: int
    ratios: dict[str, float]
    peers: tuple[str, ...]
    days: tuple[str, str]
    is_stale: bool

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios; call only where there is a ratio."""
        return exp(sum(map(log, self.ratios.values())) / len(self.ratios))


def summaries(measurements: Sequence[Measurement], gpu: str) -> list[Summary]:
    """A summary of every complete entry, by name, from the races that decide calls.

    Only device time counts (regime ``graph``). Predictions are left out.
    """
    rows = [row for row in published(board(measurements, gpu)) if row.kind == "measured"]
    return [
        _summary(name, gpu, [row for row in rows if row.entry == name])
        for name in catalog.complete()
    ]


def _summary(name: str, gpu: str, rows: Sequence[Row]) -> Summary:
    raced = [row for row in rows if row.peers]
    days = sorted(row.created_at[:10] for row in rows) or [""]
    return Summary(
        entry=name,
        gpu=gpu,
        num_problems=len(rows),
        ratios={row.title: min(row.peers.values()) for row in raced},
        peers=tuple(peer for peer, _ in Counter(row.baseline for row in raced).most_common()),
        days=(days[0], days[-1]),
        is_stale=any(row.stale for row in rows),
    )


def markdown(measurements: Sequence[Measurement], gpu: str) -> str:
    """The summaries as a Markdown table with links to the pages in ``docs/``."""
    lines = [
        "| entry | what it computes | × best peer | worst to best | fastest peers | raced |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    skus = sorted({row.gpu for row in measurements if row.kind == "measured"})
    others = [summaries(measurements, sku) for sku in skus if sku != gpu]
    for here, *elsewhere in zip(summaries(measurements, gpu), *others, strict=True):
        summary = here if here.num_problems else max((here, *elsewhere), key=_num_ratios)
        name, text = summary.entry, catalog.entry(summary.entry).summary
        mark = STALE if summary.is_stale else ""
        where = "" if summary.gpu == gpu else f" on {summary.gpu}"
        lines.append(
            f"| [`{name}`](docs/entries/{name}.md) | {text.rstrip('.')} "
            f"| {_mean(summary)}{mark}{where} | {_range(summary)} | {', '.join(summary.peers)} "
            f"| [{_count(summary)}](docs/results/{name}.md) |"
        )
    incomplete = [name for name in catalog.names() if catalog.entry(name).work_in_progress]
    links = ", ".join(f"[`{name}`](docs/entries/{name}.md)" for name in incomplete)
    lines += ["", f"Work in progress, not listed above: {links}."] if links else []
    return "\n".join((*lines, ""))


def _num_ratios(summary: Summary) -> int:
    return len(summary.ratios)


def _mean(summary: Summary) -> str:
    return f"**{ratio(summary.mean)}**" if summary.ratios else "not measured"


def _range(summary: Summary) -> str:
    values = summary.ratios.values()
    return f"{ratio(min(values))} to {ratio(max(values))}" if len(values) > 1 else ""


def _count(summary: Summary) -> str:
    """The number of problems, and how many of them have a ratio if not all."""
    raced, measured = len(summary.ratios), summary.num_problems
    if not measured:
        return "none yet"
    number = str(measured) if raced == measured else f"{raced} of {measured}"
    return f"{number} problem{'s' * (measured > 1)}"
