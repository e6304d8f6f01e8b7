"""Rows as text cells: what the table, HTML and Markdown have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kernelcat.implementation import LANGUAGES
from kernelcat.leaderboard.board import Row, comparable, means
from kernelcat.store.races import TIE

TIED, STALE, PREDICTED = "≈", "†", "~"


@dataclass(frozen=True)
class Grid:
    """One table: everything is text. ``shares`` are each line's share of the roof, for bars."""

    title: str
    caption: str
    headers: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    mean: tuple[str, ...]
    configs: tuple[str, ...]
    shares: tuple[float | None, ...]
    notes: tuple[str, ...]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """One grid for every entry, GPU, regime and kind among ``rows``."""
    return [_grid(list(group)) for _, group in groupby(rows, key=lambda row: row.section)]


def _grid(rows: list[Row]) -> Grid:
    peers = sorted({peer for row in rows for peer in row.peers})
    spoken = [name for name in LANGUAGES if any(name in row.languages for row in rows)]
    total, alike = means(rows), comparable(rows)
    return Grid(
        title=f"{rows[0].entry} on {rows[0].gpu}, {rows[0].regime} regime"
        + (", predicted" if rows[0].kind == "predicted" else ""),
        caption=_caption(rows),
        headers=("problem", "best", "µs", "rate", "of roof", *(f"× {p}" for p in peers), *spoken),
        lines=tuple(_line(row, peers, spoken, row in alike) for row in rows),
        mean=(
            "geometric mean", "", "", "", _percent(total.roofline),
            *(_ratio(total.peers.get(name)) for name in peers),
            *(_ratio(total.languages.get(name)) for name in spoken),
        ),
        configs=tuple(", ".join(f"{k}={v}" for k, v in row.config.items()) for row in rows),
        shares=tuple(row.roofline for row in rows),
        notes=tuple(_notes(rows, bool(peers))),
    )  # fmt: skip


def _line(row: Row, peers: list[str], spoken: list[str], alike: bool) -> tuple[str, ...]:
    ours = [tie for tie in row.ties if not tie.startswith("peer/")]
    best = f"{row.language}/{row.variant}" + (STALE if row.stale else "") + (TIED if ours else "")
    return (
        row.title,
        best,
        _time(row),
        f"{row.tflops:,.0f} TFLOP/s" if row.bound == "compute" else f"{row.tbps:.2f} TB/s",
        _percent(row.roofline),
        *(_ratio(row.peers.get(p)) + (TIED if f"peer/{p}" in row.ties else "") for p in peers),
        *(_ratio(row.languages.get(name) if alike else None) for name in spoken),
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


def _caption(rows: list[Row]) -> str:
    """When, in which runs, at which clocks and power."""
    days = _span(sorted({row.created_at[:10] for row in rows}))
    runs = sorted({row.run for row in rows})
    parts = [f"{rows[0].kind} {days}", f"run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs"]
    clocks = _numbers(row.sm_clock_mhz for row in rows)
    watts = _numbers(row.power_w for row in rows)
    parts += [f"{_span(clocks)} MHz"] if clocks else []
    parts += [f"{_span(watts)} W"] if watts else []
    return ", ".join(parts)


def _numbers(values: Iterable[float | None]) -> list[str]:
    return [f"{value:.0f}" for value in sorted(v for v in values if v is not None)]


def _span(ordered: Sequence[str]) -> str:
    low, high = ordered[0], ordered[-1]
    return low if low == high else f"{low} to {high}"


def _time(row: Row) -> str:
    digits = 0 if row.median_us >= 1000 else 1 if row.median_us >= 10 else 2
    if row.ci_us is None:
        return f"{PREDICTED}{row.median_us:,.{digits}f}"
    spread = max(row.median_us - row.ci_us[0], row.ci_us[1] - row.median_us)
    return f"{row.median_us:,.{digits}f} ± {spread:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
