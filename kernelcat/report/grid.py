"""The leaderboard's rows as text cells, from which tables, HTML and Markdown are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.report.board import Rates, Row, comparable, means
from kernelcat.report.sheet import Sheet
from kernelcat.store.measurement import REGIMES, Measurement
from kernelcat.store.races import STATES, TIE

TIED, STALE, PREDICTED, DOUBTFUL = "≈", "†", "~", "‡"
"""Marks of cells; :func:`_notes` explains them."""


@dataclass(frozen=True)
class Grid:
    """One table of text cells.

    Attributes
    ----------
    command : the command line that shows this table
    lines : cells by line and column
    mean : cells of the last line, the geometric means
    configs : configuration of each line's winner
    shares : each line's share of the roofline, for bars; None where unknown
    notes : sentences below the table
    """

    title: str
    command: str
    headers: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    mean: tuple[str, ...]
    configs: tuple[str, ...]
    shares: tuple[float | None, ...]
    notes: tuple[str, ...]

    @property
    def sheet(self) -> Sheet:
        return Sheet(self.title, self.headers, self.lines, self.notes, slice(2, None), self.mean)


def grids(rows: Sequence[Row]) -> list[Grid]:
    """One grid for each section (entry, GPU, regime, kind and state) of ``rows``."""
    return [_grid(list(group)) for _, group in groupby(rows, key=lambda row: row.section)]


def _grid(rows: list[Row]) -> Grid:
    peers = sorted({peer for row in rows for peer in row.peers})
    languages = [name for name in LANGUAGES if any(name in row.languages for row in rows)]
    total, with_means = means(rows), {id(row) for row in comparable(rows)}
    return Grid(
        title=f"{rows[0].entry} on {rows[0].gpu}, {rows[0].regime} regime, {rows[0].state}",
        command=_command(rows[0]),
        headers=(
            "problem", "best", "µs", "rate", "of roof", *(f"× {peer}" for peer in peers), *languages
        ),
        lines=tuple(_line(row, peers, languages, id(row) in with_means) for row in rows),
        mean=(
            "geometric mean", "", "", "", percent(total.roofline),
            *(ratio(total.peers.get(name)) for name in peers),
            *(ratio(total.languages.get(name)) for name in languages),
        ),
        configs=tuple(", ".join(f"{k}={v}" for k, v in row.config.items()) for row in rows),
        shares=tuple(row.roofline for row in rows),
        notes=(f"{caption(rows)}.", *_notes(rows, bool(peers))),
    )  # fmt: skip


def _line(row: Row, peers: list[str], languages: list[str], has_ratios: bool) -> tuple[str, ...]:
    """The cells of a row; ``has_ratios`` is whether the languages' ratios are shown."""
    ours = [tie for tie in row.ties if not tie.startswith("peer/")]
    marks = (STALE if row.stale else "") + (DOUBTFUL if row.doubtful else "")
    best = f"{row.language}/{row.variant}" + marks + (TIED if ours else "")
    return (
        row.title,
        best,
        duration(row.median_us, row.ci_us),
        rate(row),
        percent(row.roofline),
        *(ratio(row.peers.get(p)) + (TIED if f"peer/{p}" in row.ties else "") for p in peers),
        *(ratio(row.languages.get(name) if has_ratios else None) for name in languages),
    )


def _notes(rows: list[Row], has_peers: bool) -> list[str]:
    notes = []
    if has_peers:
        notes.append("× peer: its time over ours in the same run; above 1 we are faster.")
    baseline = "the fastest peer" if has_peers else "the winner"
    notes.append(f"Languages: {baseline}'s time over that language's best time.")
    if any(row.ties for row in rows):
        notes.append(
            f"{TIED} a tie: within {TIE:.0%}, or the 95 % intervals overlap; "
            "shown is the one that the tune declared the winner, "
            "else the first by language, variant and configuration."
        )
    if any(row.stale for row in rows):
        notes.append(f"{STALE} stale: the kernel's sources changed since; tune again.")
    if any(row.doubtful for row in rows):
        notes.append(
            f"{DOUBTFUL} a result that cannot be true is left out: kernelcat db verify lists it."
        )
    if any(row.kind == "predicted" for row in rows):
        notes.append(f"{PREDICTED} predicted by the analytic model; nothing ran.")
    return notes


def caption(rows: Sequence[Row | Measurement]) -> str:
    """Kind, dates, thermal state, runs, SM clocks (MHz) and power (W) of ``rows``."""
    days = _span(sorted({row.created_at[:10] for row in rows}))
    runs = sorted({row.run for row in rows})
    parts = [f"{rows[0].kind} {days}"]
    parts += [rows[0].state] if rows[0].state != rows[0].kind else []
    parts += [f"run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs"]
    clocks = _numbers(row.sm_clock_mhz for row in rows)
    watts = _numbers(row.power_w for row in rows)
    parts += [f"{_span(clocks)} MHz"] if clocks else []
    parts += [f"{_span(watts)} W"] if watts else []
    return ", ".join(parts)


def _command(row: Row) -> str:
    regime = f" --regime {row.regime}" if row.regime != REGIMES[0] else ""
    state = f" --state {row.state}" if row.state in STATES[1:] else ""  # STATES[0]: the default
    return f"kernelcat leaderboard {row.entry} --gpu {row.gpu}{regime}{state}"


def _numbers(values: Iterable[float | None]) -> list[str]:
    return [f"{value:.0f}" for value in sorted(v for v in values if v is not None)]


def _span(ordered: Sequence[str]) -> str:
    low, high = ordered[0], ordered[-1]
    return low if low == high else f"{low} to {high}"


def duration(median_us: float, ci_us: tuple[float, float] | None) -> str:
    """A time in microseconds with the larger half of its interval; a prediction has no interval."""
    digits = 0 if median_us >= 1000 else 1 if median_us >= 10 else 2
    if ci_us is None:
        return f"{PREDICTED}{median_us:,.{digits}f}"
    spread = max(median_us - ci_us[0], ci_us[1] - median_us)
    return f"{median_us:,.{digits}f} ± {spread:,.{digits}f}"


def rate(work: Row | Rates) -> str:
    """TFLOP/s where compute bounds the roofline, else TB/s."""
    compute = work.bound == "compute"
    return f"{figure(work.tflops)} TFLOP/s" if compute else f"{work.tbps:.2f} TB/s"


def figure(value: float) -> str:
    """A number with three digits; with one digit below 0.1."""
    if value < 0.1:
        return f"{value:.1g}"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def percent(share: float | None) -> str:
    """A share of the roofline as a percentage; empty for None. What is little is not called 0."""
    if share is None:
        return ""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def ratio(value: float | None) -> str:
    """A ratio with two decimals; empty for None. What is little is not called 0."""
    if value is None:
        return ""
    return "<0.01" if 0 < value < 0.005 else f"{value:.2f}"
