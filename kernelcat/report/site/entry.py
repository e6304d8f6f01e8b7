"""The page of an entry: how to call it, plots with their tables, the ladder, and sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.report import missing_peers, traffic
from kernelcat.report.board import Row
from kernelcat.report.entry_page import example
from kernelcat.report.grid import grids
from kernelcat.report.ladder import Ladder, ladders
from kernelcat.report.ladder import sheet as ladder_sheet
from kernelcat.report.site import plots
from kernelcat.report.site.history import history_part
from kernelcat.report.site.markup import link, page, sheet, table, text
from kernelcat.report.site.random_races import random_part
from kernelcat.report.site.sources import sources
from kernelcat.report.site.spread import spread_part
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import Measurement
from kernelcat.store.history import Past
from kernelcat.store.measurement import REGIMES
from kernelcat.store.random_races import RandomRaces
from kernelcat.verify.profiles import Profile

_COLUMNS = 44
"""Columns of an example that a phone shows."""


def entry_page(
    name: str,
    rows: Sequence[Row],
    measurements: Sequence[Measurement],
    profiles: Sequence[Profile],
    random: Sequence[RandomRaces],
    past: Sequence[Past],
    judged: str,
    is_current: Callable[[Measurement], bool],
) -> str:
    """The page of the entry ``name``.

    Parameters
    ----------
    rows : its lines of the board, of all GPUs
    measurements : the rows of its races
    profiles, random, past : bytes that the hardware counted, races on random problems, and races
        from old to new
    judged : the part of the page with audits of its cost models and tunes
    is_current : whether a row timed the code that runs today
    """
    entry = catalog.entry(name)
    parts = [f'<p class="lead">{text(entry.summary)}</p>\n']
    if entry.work_in_progress:
        parts.append("<p><strong>Work in progress</strong>: incomplete, and may change.</p>\n")
    gpus = sorted({row.gpu for row in rows})
    if gpus:
        parts.append(f"<p>Results on {', '.join(link('gpu', gpu) for gpu in gpus)}.</p>\n")
    call = f"import kernelcat\n\n{example(entry, _COLUMNS)}"
    parts.append(f"<h2>How to call it</h2>\n<pre><code>{text(call)}</code></pre>\n")
    ordered = sorted(rows, key=lambda row: (row.gpu, REGIMES.index(row.regime)))
    for i, (section, group) in enumerate(groupby(ordered, key=lambda row: row.section)):
        listed = list(group)
        parts.append(_section(i, section[1], listed) + spread_part(i, listed, measurements))
    if not rows:
        parts.append("<p>Nothing measured yet.</p>\n")
    parts.append(_without_peer(measurements))
    for i, each in enumerate(ladders(measurements, name, is_current=is_current)):
        parts.append(_ladder(i, each))
    for gpu in sorted({profile.gpu for profile in profiles}):
        parts.append(_bytes(gpu, [p for p in profiles if p.gpu == gpu]))
    parts += [random_part(random), judged, history_part(past), sources(name)]
    return page(name, "".join(parts))


def _section(number: int, gpu: str, rows: Sequence[Row]) -> str:
    (grid,) = grids(rows)
    head = f"<h2>{text(grid.title)}</h2>\n"
    return head + _roofline(gpu, rows) + _ratios(rows) + sheet(f"t{number}", grid.sheet)


def _roofline(gpu: str, rows: Sequence[Row]) -> str:
    """TFLOP/s over intensity; empty without arithmetic or without the GPU's peak rates."""
    known = SKUS.get(gpu)
    working = [row for row in rows if row.tflops > 0 and row.tbps > 0]
    if known is None or not working:
        return ""
    marks = [
        plots.Point(row.tflops / row.tbps, row.tflops, f"{row.title}: {row.tflops:.3g} TFLOP/s",
                    row.kind == "measured")
        for row in working
    ]  # fmt: skip
    dtypes = {
        catalog.entry(row.entry).product_dtype(Problem.of(row.entry, **row.problem))
        for row in working
    }
    peaks = sorted({1e6 / known.roofline_us(10**12, 0, dtype) for dtype in dtypes})
    bandwidth = known.bandwidth / 1e12
    low = min(p.x for p in marks) / 2
    roofs = []
    for peak in peaks:
        ridge = peak / bandwidth
        high = max(2 * ridge, 2 * max(p.x for p in marks))
        roofs.append([(min(low, ridge / 2), min(low, ridge / 2) * bandwidth), (ridge, peak),
                      (high, peak)])  # fmt: skip
    kinds = "Rings are predictions. " if any(row.kind != "measured" for row in rows) else ""
    return plots.points(
        "Roofline", "operations a byte", "TFLOP/s", marks, roofs,
        f"{kinds}A line is the least time by the datasheet's bandwidth ({bandwidth:.2f} TB/s) and "
        f"peak rate ({', '.join(f'{peak:,.0f}' for peak in peaks)} TFLOP/s).",
    )  # fmt: skip


def _ratios(rows: Sequence[Row]) -> str:
    """The ratio to the fastest peer over the bytes of a problem; empty without a peer."""
    marks = []
    for row in rows:
        megabytes = row.tbps * row.median_us
        if row.peers and row.kind == "measured" and megabytes > 0:
            best = min(row.peers.values())
            marks.append(plots.Point(megabytes, best, f"{row.title}: {best:.2f}\u00d7", best >= 1))
    if not marks:
        return ""
    return plots.points(
        "Ratio to the fastest peer over problem size", "least MB moved", "peer's time over ours",
        marks, caption="Dots: ours is at least as fast. Rings: the peer is faster. The line is 1.",
        y_base=2, level=1.0,
    )  # fmt: skip


def _without_peer(measurements: Sequence[Measurement]) -> str:
    """A table of the problems without a peer and the reasons; empty where each has one."""
    lines = [
        (text(name), f'<span class="wide">{text(why)}</span>')
        for why, names in missing_peers.by_reason(measurements).items()
        for name in names
    ]
    made = table(
        "unpeered", "Problems that were measured without a peer", ("problem", "why"), lines
    )
    return f"<h2>Without a peer</h2>\n{made}" if lines else ""


def _ladder(number: int, ladder: Ladder) -> str:
    table = ladder_sheet(ladder)
    groups = [
        (
            f"{step.language}/{step.variant}",
            (step.over_first,),
            _proof(step.techniques),
        )
        for step in ladder.steps
    ]
    plot = plots.bars(
        "Speedup over the first step", groups,
        caption=f"First step: {ladder.first}. After a name: the instructions that prove the step.",
    )  # fmt: skip
    return f"<h2>Ladder: {text(table.title)}</h2>\n{plot}{sheet(f'ladder{number}', table)}"


def _proof(techniques: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(techniques.values()))


def _bytes(gpu: str, profiles: Sequence[Profile]) -> str:
    table = traffic.sheet(profiles)
    groups = [
        (f"{p.language}/{p.variant}",
         tuple(None if c is None else c / 1e6 for c in
               (p.counts.dram_read_bytes + p.counts.dram_write_bytes, p.counts.l2_read_bytes,
                p.counts.sm_read_bytes)), "")
        for p in profiles
    ]  # fmt: skip
    plot = plots.bars("MB by level of memory", groups, ("DRAM", "read from L2", "arrived in SMs"))
    return (
        f"<h2>Bytes that the hardware counted on {text(gpu)}</h2>\n{plot}"
        f"{sheet(_bytes_id(gpu), table)}"
    )


def _bytes_id(gpu: str) -> str:
    """An id for the table of a GPU's bytes."""
    return "bytes-" + "".join(c if c.isalnum() and c.isascii() else "-" for c in gpu)
