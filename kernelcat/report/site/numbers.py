"""The page on how numbers are made: what a time, a ratio and a mark mean, and how to repeat it."""

from __future__ import annotations

from kernelcat.report.grid import DOUBTFUL, PREDICTED, STALE, TIED
from kernelcat.report.site.markup import page, text

_PARTS = {
    "A time": "The median of many blocks of calls in microseconds, with its 95 % interval. Inputs "
    "rotate through more memory than L2 holds. Clocks are not locked; SM clock and power are "
    "recorded with each row. A time below the roofline is an error, not a record.",
    "Regimes": "graph is device time, by CUDA graphs. eager has the host's time of a call too.",
    "Thermal states": "sustained: the chip is warmed up and never rests. burst: it rests before "
    "each block. ladder: a race of all variants. screen: a quick first measurement, which stands "
    "where no race followed. Calls, and the tables here, go by sustained where there is such a "
    "race, else by burst.",
    "A ratio": "A peer is another project's implementation as published, raced in the same run. A "
    "ratio is the peer's time over ours: above 1 ours is faster. Tables of entries take the "
    "fastest peer of each problem; the geometric mean covers problems with a peer. A row without "
    "a ratio had no peer in its race.",
    "The roofline": "The longer of two times: minimum arithmetic at the GPU's peak rate, and "
    "minimum bytes at its peak bandwidth, both from the vendor's datasheet. A small problem is "
    "bound by the launch and stays far below it.",
    "Samples": "A time is the median of one sample a block. Newer rows keep all samples, or 32 "
    "quantiles of more, and a page shows those of the winner and of its fastest peer. Older rows "
    "have the interval alone.",
    "The winner over time": "A ratio of each race of a problem, from the first race on. Times of "
    "two days are not compared: clocks, drivers and peers differ.",
    "Right before fast": "Each candidate is compared with an oracle on several seeds before it is "
    "timed, between guard bands of NaN. A wrong result is never timed.",
    "Ladders": "One race of all variants of an entry, from the simplest kernel on. The "
    "instructions beside a step were found in the machine code that runs.",
    "Bytes": "Nsight Compute counts bytes by level of memory in one call with cold caches.",
    "Predictions": "The analytic cost model's estimates. They are marked with ~, have no "
    "interval, and are never mixed into ratios. Below they are judged by races.",
}
_MARKS = {
    TIED: "a tie: within 1 %, or the intervals overlap",
    STALE: "stale: the kernel runs other code today; measure again",
    DOUBTFUL: "a result that cannot be true is left out of the row",
    PREDICTED: "predicted: nothing ran",
}
_COMMANDS = (
    ("Race an entry and its peers on this machine's GPU.", "kernelcat tune gemm"),
    ("Compare every variant with the oracle.", "kernelcat check gemm"),
    ("Judge the cost models by races.", "kernelcat predict --audit"),
    ("List results that cannot be true.", "kernelcat db verify"),
    ("Write these pages again, with your own results.", "kernelcat leaderboard --html site"),
)


def numbers_page(audits: str = "") -> str:
    """What a time, a ratio and a mark mean, the commands that repeat them, and ``audits``."""
    body = "".join(
        f'<h2>{head}</h2>\n<p class="lead">{text(words)}</p>\n' for head, words in _PARTS.items()
    )
    marks = "".join(f"<dt>{text(k)}</dt><dd>{text(words)}.</dd>" for k, words in _MARKS.items())
    commands = "\n".join(f"# {what}\n{command}" for what, command in _COMMANDS)
    return page(
        "How numbers are made",
        f"{body}<h2>Marks in tables</h2>\n<dl>{marks}</dl>\n"
        f"<h2>How to repeat them</h2>\n<pre><code>{text(commands)}</code></pre>\n{audits}",
    )
