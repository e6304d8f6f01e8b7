"""Rows as text cells: what the table, HTML and Markdown have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.report.board import Rates, Row, comparable, means
from kernelcat.report.sheet import Sheet
from kernelcat.store.measurement import REGIMES, Measurement
from kernelcat.store.races import STATES, TIE

TIED, STALE, PREDICTED = "≈", "†", "~"


@dataclass(frozen=True)
class Grid:
    """One table: everything is text. ``shares`` are each line's share of the roof, for bars.

    ``command`` is what a user types to see it.
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
    """One grid for every entry, GPU, regime, kind and state among ``rows``."""
    return [_grid(list(group)) for _, group in groupby(rows, key=lambda row: row.section)]


def _grid(rows: list[Row]) -> Grid:
    peers = sorted({peer for row in rows for peer in row.peers})
    spoken = [name for name in LANGUAGES if any(name in row.languages for row in rows)]
    total, alike = means(rows), comparable(rows)
    return Grid(
        title=f"{rows[0].entry} on {rows[0].gpu}, {rows[0].regime} regime, {rows[0].state}",
        command=_command(rows[0]),
        headers=("problem", "best", "µs", "rate", "of roof", *(f"× {p}" for p in peers), *spoken),
        lines=tuple(_line(row, peers, spoken, row in alike) for row in rows),
        mean=(
            "geometric mean", "", "", "", percent(total.roofline),
            *(ratio(total.peers.get(name)) for name in peers),
            *(ratio(total.languages.get(name)) for name in spoken),
        ),
        configs=tuple(", ".join(f"{k}={v}" for k, v in row.config.items()) for row in rows),
        shares=tuple(row.roofline for row in rows),
        notes=(f"{caption(rows)}.", *_notes(rows, bool(peers))),
    )  # fmt: skip


def _line(row: Row, peers: list[str], spoken: list[str], alike: bool) -> tuple[str, ...]:
    ours = [tie for tie in row.ties if not tie.startswith("peer/")]
    best = f"{row.language}/{row.variant}" + (STALE if row.stale else "") + (TIED if ours else "")
    return (
        row.title,
        best,
        duration(row.median_us, row.ci_us),
        rate(row),
        percent(row.roofline),
        *(ratio(row.peers.get(p)) + (TIED if f"peer/{p}" in row.ties else "") for p in peers),
        *(ratio(row.languages.get(name) if alike else None) for name in spoken),
    )


def _notes(rows: list[Row], raced: bool) -> list[str]:
    notes = []
    if raced:
        notes.append("× peer: its time over ours in the same run; above 1 we are faster.")
    against = "the fastest peer" if raced else "the winner"
    notes.append(f"Languages: {against}'s time over that language's best time.")
    if any(row.ties for row in rows):
        notes.append(
            f"{TIED} a tie: within {TIE:.0%}, or the 95 % intervals overlap; broken by name."
        )
    if any(row.stale for row in rows):
        notes.append(f"{STALE} stale: the kernel's sources changed since; tune again.")
    if any(row.kind == "predicted" for row in rows):
        notes.append(f"{PREDICTED} predicted by the analytic model; nothing ran.")
    return notes


def caption(rows: Sequence[Row | Measurement]) -> str:
    """When, in which state and runs, at which clocks and power."""
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
    state = f" --state {row.state}" if row.state in STATES[1:] else ""  # the first is the default
    return f"kernelcat leaderboard {row.entry} --gpu {row.gpu}{regime}{state}"


def _numbers(values: Iterable[float | None]) -> list[str]:
    return [f"{value:.0f}" for value in sorted(v for v in values if v is not None)]


def _span(ordered: Sequence[str]) -> str:
    low, high = ordered[0], ordered[-1]
    return low if low == high else f"{low} to {high}"


def duration(median_us: float, ci_us: tuple[float, float] | None) -> str:
    """Microseconds with their spread; a prediction has none."""
    digits = 0 if median_us >= 1000 else 1 if median_us >= 10 else 2
    if ci_us is None:
        return f"{PREDICTED}{median_us:,.{digits}f}"
    spread = max(median_us - ci_us[0], ci_us[1] - median_us)
    return f"{median_us:,.{digits}f} ± {spread:,.{digits}f}"


def rate(work: Row | Rates) -> str:
    """TFLOP/s where arithmetic is the lower roof, else TB/s."""
    compute = work.bound == "compute"
    return f"{figure(work.tflops)} TFLOP/s" if compute else f"{work.tbps:.2f} TB/s"


def figure(value: float) -> str:
    """Three digits, or the first one of a small number."""
    if value < 0.1:
        return f"{value:.1g}"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def percent(share: float | None) -> str:
    """Of a roof; nothing for a GPU without one."""
    return "" if share is None else f"{share:.0%}"


def ratio(value: float | None) -> str:
    """Two decimals; nothing for nothing."""
    return "" if value is None else f"{value:.2f}"
