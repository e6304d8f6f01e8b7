"""The overview, the page of a SKU, and the page on how numbers are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log

from kernelcat import catalog
from kernelcat.report.board import Row
from kernelcat.report.grid import ratio
from kernelcat.report.site import plots
from kernelcat.report.site.markup import link, page, table, text
from kernelcat.runtime.gpu import SKUS

_STATES = {
    "verified": ("\u2714 verified", "compared with the oracle and timed on this GPU"),
    "compiled": ("\u25cb compiled", "machine code is recorded for this GPU; no time is known"),
    "predicted": ("~ predicted", "the cost model's estimate; nothing ran"),
}


@dataclass(frozen=True)
class Line:
    """An entry on a GPU, in device time (regime ``graph``).

    Attributes
    ----------
    state : ``verified``, ``compiled`` or ``predicted``
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


def lines(rows: Sequence[Row], compiled: Iterable[tuple[str, str]]) -> list[Line]:
    """A line for each entry and SKU of ``rows`` and ``compiled``, by name."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.regime == "graph":
            groups[row.entry, row.gpu].append(row)
    known = {pair for pair in compiled if pair[0] in catalog.names()}
    return [_line(*pair, groups.get(pair, [])) for pair in sorted(groups.keys() | known)]


def _line(entry: str, gpu: str, rows: Sequence[Row]) -> Line:
    measured = [row for row in rows if row.kind == "measured"]
    return Line(
        entry=entry,
        gpu=gpu,
        state="verified" if measured else "predicted" if rows else "compiled",
        ratios={row.title: min(row.peers.values()) for row in measured if row.peers},
        problems=len(measured or rows),
        day=max((row.created_at[:10] for row in measured), default=""),
        stale=any(row.stale for row in measured),
    )


def overview_page(listed: Sequence[Line]) -> str:
    gpus = ", ".join(link("gpu", gpu) for gpu in sorted({line.gpu for line in listed}))
    intro = (
        '<p class="lead">GPU kernels in CUDA C++, Triton and CuTe DSL, raced against other '
        "people's kernels. A ratio is the fastest peer's time over ours in the same run: above 1 "
        "ours is faster.</p>\n"
    )
    return page(
        "Kernels and their peers",
        f"{intro}<p>GPUs: {gpus or 'no results yet'}.</p>\n{_board(listed)}{_legend()}",
    )


def gpu_page(gpu: str, listed: Sequence[Line]) -> str:
    known = SKUS.get(gpu)
    facts = "<p>This GPU is not in the catalog's table.</p>\n"
    if known:
        peaks = "; ".join(f"{t}: {r / 1e12:,.0f} TFLOP/s" for t, r in known.flops.items())
        facts = (
            f"<p>{text(known.name)}: {known.sms} SMs, {text(known.arch)}, "
            f"{known.bandwidth / 1e12:.2f} TB/s, {known.memory_bytes / 2**30:.0f} GiB, "
            f"{known.l2_bytes / 2**20:.0f} MiB of L2. Dense peaks: {text(peaks)}.</p>\n"
        )
    means = sorted(((line.mean, line.entry) for line in listed if line.mean), reverse=True)
    plot = plots.bars(
        "Geometric mean of the ratios to the fastest peer",
        [(name, (mean,), f"{mean:.2f}\u00d7") for mean, name in means],
        caption="Longer is better; at 1.00\u00d7 both take the same time.",
    )
    return page(f"{gpu}", facts + (plot if means else "") + _board(listed) + _legend())


def _board(listed: Sequence[Line]) -> str:
    headers = ("entry", "GPU", "state", "mean", "best", "worst", "newest", "problems",
               "with a peer", "worst problem")  # fmt: skip
    return table(
        "board",
        "Device time: ratio to the fastest peer, geometric mean, best and worst problem",
        headers,
        map(_cells, listed),
        (3, 4, 5, 7, 8),
    )


def _cells(line: Line) -> tuple[str, ...]:
    worst = min(line.ratios, key=lambda name: line.ratios[name]) if line.ratios else ""
    progress = " (in progress)" if catalog.entry(line.entry).work_in_progress else ""
    stale = ' <abbr title="the sources changed since: measure again">stale</abbr>'
    return (
        link("entry", line.entry) + progress,
        link("gpu", line.gpu),
        f'<span class="state {line.state}">{_STATES[line.state][0]}</span>',
        ratio(line.mean),
        ratio(max(line.ratios.values(), default=None)),
        ratio(min(line.ratios.values(), default=None)),
        line.day + (stale if line.stale else ""),
        str(line.problems),
        str(len(line.ratios)),
        text(worst),
    )


def _legend() -> str:
    return "".join(
        f'<p><span class="state {name}">{mark}</span> {meaning}.</p>\n'
        for name, (mark, meaning) in _STATES.items()
    )


def numbers_page() -> str:
    """What a time, a ratio and a state mean."""
    parts = {
        "A time": "The median of many samples in microseconds, with a 95 % interval. "
        "Inputs rotate through more memory than L2 holds. Clocks are not locked; SM clock and "
        "power are recorded with each row. A time below the roofline is an error, not a record.",
        "Regimes": "graph is device time, by CUDA graphs. eager has the host's time of a call too.",
        "Thermal states": "sustained: the chip is warmed up and never rests. burst: it rests "
        "before each block. ladder: a race of all variants. Calls, and the tables here, go by "
        "sustained where there is such a race.",
        "A ratio": "A peer is another project's implementation as published, raced in the same "
        "run. A ratio is the peer's time over ours: above 1 ours is faster. Tables of entries take "
        "the fastest peer of each problem; the geometric mean covers problems with a peer.",
        "The roofline": "The longer of two times: minimum arithmetic at the GPU's peak rate, and "
        "minimum bytes at its peak bandwidth, both from the vendor's datasheet.",
        "Right before fast": "Each candidate is compared with a float32 oracle on several seeds "
        "before it is timed, between guard bands of NaN. A wrong result is never timed.",
        "Bytes": "Nsight Compute counts bytes by level of memory in one call with cold caches.",
        "Predictions": "The analytic cost model's estimates. They are marked with ~, have no "
        "interval, and are never mixed into ratios.",
    }
    body = "".join(
        f"<h2>{head}</h2>\n<p class=lead>{text(words)}</p>\n" for head, words in parts.items()
    )
    return page("How numbers are made", body)
