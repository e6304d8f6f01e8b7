"""The board as an SVG picture: every problem of every entry against its fastest peer."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from kernelcat.report.grid import ratio
from kernelcat.report.summary import Summary, summaries
from kernelcat.report.svg import DIM, GRID, INK, page, text
from kernelcat.runtime.gpu import find
from kernelcat.store import Measurement

WIDTH, ROW, TOP, BOTTOM = 880, 26, 84, 56
LEFT, RIGHT = 150, 70
"""Pixels: the picture, a line, and the margins around the plot."""
TICKS = (0.25, 0.5, 1, 2, 4, 8)
MIN_RATIO, MAX_RATIO = 0.2, 12.0
"""Ends of the logarithmic axis; a ratio beyond an end is drawn at that end, as a triangle."""

_FASTER, _SLOWER = "#1a7f37", "#b35900"


def to_svg(measurements: Sequence[Measurement], gpu: str) -> str:
    """The picture of a GPU's results, largest mean first; light, with a background of its own.

    A filled dot is a problem on which the winner is at least as fast as the fastest peer, a ring
    is one on which it is slower, and a bar is the geometric mean.
    """
    shown = [summary for summary in summaries(measurements, gpu) if summary.ratios]
    shown.sort(key=lambda summary: -summary.mean)
    height = TOP + ROW * len(shown) + BOTTOM
    title = f"kernelcat against the fastest peer of each problem, {find(gpu).name}"
    body = "\n".join(
        (
            *(_tick(value, height) for value in TICKS),
            *(_line(summary, TOP + ROW * (i + 0.5)) for i, summary in enumerate(shown)),
            *_legend(height),
        )
    )
    subtitle = "Time of the fastest peer over ours; right of 1 we are faster."
    return page(WIDTH, height, title, subtitle, _description(shown), body)


def _description(shown: Sequence[Summary]) -> str:
    return "; ".join(f"{s.entry} {ratio(s.mean)} on {len(s.ratios)} problems" for s in shown)


def _x(value: float) -> float:
    """The horizontal position of a ratio."""
    share = log2(value / MIN_RATIO) / log2(MAX_RATIO / MIN_RATIO)
    return LEFT + min(max(share, 0), 1) * (WIDTH - LEFT - RIGHT)


def _tick(value: float, height: int) -> str:
    x, color, width = _x(value), INK if value == 1 else GRID, 1.5 if value == 1 else 1
    line = (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" '
        f'stroke="{color}" stroke-width="{width}"/>'
    )
    return line + text(x, TOP - 8, f"{value:g}×", DIM, anchor="middle")


def _line(summary: Summary, y: float) -> str:
    mean = _x(summary.mean)
    parts = [text(LEFT - 14, y + 4, summary.entry, anchor="end")]
    parts += [_mark(value, y) for value in sorted(summary.ratios.values())]
    parts.append(
        f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 9}" y2="{y + 9}" '
        f'stroke="{INK}" stroke-width="3"/>'
    )
    parts.append(text(WIDTH - 16, y + 4, f"{ratio(summary.mean)}×", weight="600", anchor="end"))
    return "".join(parts)


def _mark(value: float, y: float) -> str:
    x, color = _x(value), _FASTER if value >= 1 else _SLOWER
    if not MIN_RATIO <= value <= MAX_RATIO:
        tip = 6 if value > MAX_RATIO else -6
        return f'<path d="M{x - tip:.1f} {y - 5}v10L{x:.1f} {y}z" fill="{color}"/>'
    fill = f'fill="{color}" fill-opacity=".45"' if value >= 1 else f'fill="none" stroke="{color}"'
    return f'<circle cx="{x:.1f}" cy="{y}" r="4" {fill}/>'


def _legend(height: int) -> list[str]:
    y = height - 26
    return [
        f'<circle cx="{LEFT}" cy="{y - 4}" r="4" fill="{_FASTER}" fill-opacity=".45"/>',
        text(LEFT + 10, y, "a problem, we are faster", DIM),
        f'<circle cx="{LEFT + 185}" cy="{y - 4}" r="4" fill="none" stroke="{_SLOWER}"/>',
        text(LEFT + 195, y, "the peer is faster", DIM),
        f'<line x1="{LEFT + 330}" x2="{LEFT + 330}" y1="{y - 12}" y2="{y + 4}" '
        f'stroke="{INK}" stroke-width="3"/>',
        text(LEFT + 340, y, "geometric mean, also at the right", DIM),
    ]
