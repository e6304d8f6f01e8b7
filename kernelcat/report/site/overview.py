"""The overview and the page of a SKU: a line for each entry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from kernelcat import catalog
from kernelcat.report.board import Row
from kernelcat.report.grid import ratio
from kernelcat.report.site import plots
from kernelcat.report.site.markup import link, page, table, text
from kernelcat.runtime.environment import NONE
from kernelcat.runtime.gpu import SKUS
from kernelcat.store import Measurement

_STATES = {
    "verified": ("\u2714", "compared with the oracle and timed on this GPU"),
    "checked": (
        "\u25c7",
        "a receipt holds: today's code matched the oracle on this GPU; no time is known",
    ),
    "compiled": (
        "\u25cb",
        "compiled for this GPU; neither a check of today's code nor a time is on record",
    ),
    "predicted": ("~", "the cost model's estimate; nothing ran"),
}


@dataclass(frozen=True)
class Line:
    """An entry on a GPU; ratios and problems are of device time (regime ``graph``).

    Attributes
    ----------
    state : a key of ``_STATES``
    ratios : time of the fastest peer over time of the winner, by problem; measured rows only
    problems : problems that were measured, or predicted
    day : the newest day of a measurement; empty where nothing was measured
    """

    entry: str
    gpu: str
    state: str
    ratios: dict[str, float]
    problems: int
    day: str
    stale: bool

    @property
    def mean(self) -> float | None:
        """The geometric mean of the ratios; None without a ratio."""
        values = self.ratios.values()
        return exp(sum(map(log, values)) / len(values)) if values else None


def lines(
    rows: Sequence[Row], compiled: Iterable[tuple[str, str]], checked: Iterable[tuple[str, str]]
) -> list[Line]:
    """A line for each entry and SKU of ``rows``, ``compiled`` and ``checked``, by name."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.entry, row.gpu].append(row)
    passed, names = set(checked), set(catalog.names())
    known = {pair for pair in {*compiled, *passed} if pair[0] in names}
    return [
        _line(*pair, groups.get(pair, []), pair in passed) for pair in sorted(groups.keys() | known)
    ]


def _line(entry: str, gpu: str, rows: Sequence[Row], is_checked: bool) -> Line:
    measured = [row for row in rows if row.kind == "measured"]
    device = [row for row in measured or rows if row.regime == "graph"]
    without_time = "checked" if is_checked else "predicted" if rows else "compiled"
    return Line(
        entry=entry,
        gpu=gpu,
        state="verified" if measured else without_time,
        ratios={row.title: min(row.peers.values()) for row in device if measured and row.peers},
        problems=len(device),
        day=max((row.created_at[:10] for row in measured), default=""),
        stale=any(row.stale for row in measured),
    )


def overview_page(listed: Sequence[Line], engine: str | None = None) -> str:
    """The first page; ``engine`` is the file of the engine's page, or None."""
    speeds = f' Speeds of <a href="{engine}">the engine</a>.' if engine else ""
    gpus = ", ".join(link("gpu", gpu) for gpu in sorted({line.gpu for line in listed}))
    intro = (
        '<p class="lead">GPU kernels in CUDA C++, Triton and CuTe DSL, raced against other '
        "people's kernels. A ratio is the fastest peer's time over ours in the same run: above 1 "
        "ours is faster.</p>\n"
    )
    return page(
        "Kernels and their peers",
        f"{intro}<p>GPUs: {gpus or 'no results yet'}.{speeds}</p>\n{_board(listed)}{_legend()}",
    )


def gpu_page(gpu: str, listed: Sequence[Line], measurements: Sequence[Measurement]) -> str:
    """The page of a SKU: datasheet, ratios, its entries, and the machines that were measured."""
    known = SKUS.get(gpu)
    facts = "<p>This GPU is not in the catalog's table, so that no roofline is known.</p>\n"
    if known:
        peaks = "; ".join(f"{t}: {r / 1e12:,.0f} TFLOP/s" for t, r in known.flops.items())
        facts = (
            f"<p>By the datasheet: {known.sms} SMs, {text(known.arch)}, "
            f"{known.bandwidth / 1e12:.2f} TB/s, {known.l2_bytes / 2**20:.0f} MiB of L2, "
            f"{known.power_w} W. Dense peaks: {text(peaks)}.</p>\n"
        )
    means = sorted(((line.mean, line.entry) for line in listed if line.mean), reverse=True)
    left_out = len(listed) - len(means)
    others = f" {left_out} entries without a timed peer are left out." if left_out else ""
    plot = plots.bars(
        "Geometric mean of the ratios to the fastest peer",
        [(name, (mean,), _progress(name)) for mean, name in means],
        caption=f"Longer is better. Left of the line, at 1, the peer is faster.{others}",
        mark=1.0,
    )
    title = f"{known.name} ({gpu})" if known else gpu
    body = facts + (plot if means else "") + _board(listed) + _legend() + _machines(measurements)
    return page(title, body)


def _machines(measurements: Sequence[Measurement]) -> str:
    """A table of the drivers and compilers that measured; empty without measurements."""
    days: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in measurements:
        if row.kind == "measured":
            days[_software(row.environment)].append(row.created_at[:10])
    if not days:
        return ""
    listed = [
        (
            *map(text, software[:-1]),
            f'<span class="wide">{text(software[-1])}</span>',
            f"{len(found):,}",
            min(found),
            max(found),
        )
        for software, found in sorted(days.items(), key=lambda item: max(item[1]), reverse=True)
    ]
    headers = ("driver", "CUDA", "power limit", "compilers", "rows", "first", "newest")
    caption = "Machines and software of the measured rows"
    return f"<h2>Measured with</h2>\n{table('machines', caption, headers, listed, (4,))}"


def _software(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Driver, CUDA, power limit and compilers; a foreign row may lack any of them."""
    compilers = environment.get("compilers")
    named = compilers.items() if isinstance(compilers, Mapping) else ()
    watts = environment.get("power_w")
    return (
        str(environment.get("driver", "")),
        str(environment.get("cuda", "")),
        "" if watts is None else f"{watts} W",
        ", ".join(f"{name} {version}" for name, version in sorted(named) if version != NONE),
    )


def _board(listed: Sequence[Line]) -> str:
    headers = ("entry", "GPU", "mean", "state", "best", "worst", "newest", "problems",
               "with a peer", "worst problem")  # fmt: skip
    return table(
        "board",
        "Device time: ratio to the fastest peer, geometric mean, best and worst problem",
        headers,
        map(_cells, listed),
        (2, 4, 5, 7, 8),
    )


def _cells(line: Line) -> tuple[str, ...]:
    worst = min(line.ratios, key=lambda name: line.ratios[name]) if line.ratios else ""
    stale = ' <abbr title="the sources changed since: measure again">stale</abbr>'
    return (
        f"{link('entry', line.entry)} {_progress(line.entry)}".strip(),
        link("gpu", line.gpu),
        ratio(line.mean),
        _badge(line.state),
        ratio(max(line.ratios.values(), default=None)),
        ratio(min(line.ratios.values(), default=None)),
        line.day + (stale if line.stale else ""),
        _of_named(line),
        str(len(line.ratios) or ""),
        f'<span class="wide">{text(worst)}</span>' if worst else "",
    )


def _progress(name: str) -> str:
    return "(in progress)" if catalog.entry(name).work_in_progress else ""


def _of_named(line: Line) -> str:
    """The number of problems, and of how many named ones where some are left; empty for none."""
    named = len(catalog.entry(line.entry).problems)
    rest = f" of {named}" if line.problems < named else ""
    return f"{line.problems}{rest}" if line.problems else ""


def _badge(state: str) -> str:
    """Mark and name of a state; a table on a phone shows the mark alone (style.css)."""
    mark = _STATES[state][0]
    return f'<span class="state {state}">{mark}<span class="name"> {state}</span></span>'


def _legend() -> str:
    """What the states mean."""
    return "".join(f"<p>{_badge(state)} {_STATES[state][1]}.</p>\n" for state in _STATES)
