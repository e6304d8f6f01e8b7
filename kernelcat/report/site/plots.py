"""Plots of the site as SVG, drawn here: no script and no network is needed to see them.

Colors are classes of the page's style, so that plots follow light and dark. Each plot has a title,
a description and a caption; the table beside it holds its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from math import ceil, floor, log, log10
from textwrap import wrap

from kernelcat.report.grid import figure
from kernelcat.report.site.markup import text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 260, 58, 26, 12, 46
"""Units of a plot of points, and the margins around it. A phone shows the whole width."""
MAX_POINTS = 2000
"""A plot of points shows the first so many; its caption says so."""
_BAR, _LABEL, _VALUE = 11, 15, 64
"""Heights of a bar and of its label, and the room for the value at the end of the longest bar."""
_RAISED = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


@dataclass(frozen=True)
class Point:
    """``x`` and ``y`` are positive; ``good`` is a filled dot, else the point is a ring."""

    x: float
    y: float
    label: str
    good: bool


def points(
    title: str,
    x_title: str,
    y_title: str,
    marks: Sequence[Point],
    lines: Sequence[Sequence[tuple[float, float]]] = (),
    caption: str = "",
    y_base: int = 10,
    level: float | None = None,
) -> str:
    """Points on logarithmic axes, with ``lines`` through the given positions.

    ``level`` is a y at which a line goes from side to side. The ticks of y are powers of
    ``y_base``, those of x are powers of 10.
    """
    shown = marks[:MAX_POINTS]
    corners = [corner for line in lines for corner in line]
    levels = [] if level is None else [level]
    x_low, x_high = _powers([p.x for p in shown] + [x for x, _ in corners], 10)
    y_low, y_high = _powers([p.y for p in shown] + [y for _, y in corners] + levels, y_base)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - x_low) / (x_high - x_low)
        up = (log(y, y_base) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    parts = []
    for power in range(x_low, x_high + 1):
        x = at(10.0**power, float(y_base) ** y_low)[0]
        parts.append(_segment(x, TOP, x, HEIGHT - BOTTOM))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, _tick(10, power), "middle"))
    for power in range(y_low, y_high + 1):
        y = at(10.0**x_low, float(y_base) ** power)[1]
        parts.append(_segment(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 8, y + 4, _tick(y_base, power), "end"))
    for y in (at(10.0**x_low, found)[1] for found in levels):
        parts.append(f'<polyline class="axis" points="{LEFT},{y:.1f} {WIDTH - RIGHT},{y:.1f}"/>')
    for line in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*corner) for corner in line))
        parts.append(f'<polyline class="axis" points="{path}"/>')
    for point in shown:
        parts.append(_mark(*at(point.x, point.y), point))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_title, "middle"))
    parts.append(_y_title(y_title))
    if len(shown) < len(marks):
        caption += f" Shown are the first {len(shown)} of {len(marks)} rows; the table has all."
    what = f"{len(shown)} points; {x_title} across, {y_title} up."
    return _figure(title, what, HEIGHT, parts, caption)


def timeline(
    title: str, y_title: str, series: Sequence[Sequence[Point]], caption: str = "", y_base: int = 2
) -> str:
    """A line for each of ``series`` over time, on a logarithmic axis, and a line at y = 1.

    A point's x is a day's ordinal number, with the time of day as a fraction.
    """
    shown = [point for line in series for point in line][:MAX_POINTS]
    first = floor(min(point.x for point in shown))
    last = max(ceil(max(point.x for point in shown)), first + 1)
    y_low, y_high = _powers([point.y for point in shown] + [1.0], y_base)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first) / (last - first), (log(y, y_base) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    parts = []
    step = max(1, ceil((last - first) / 4))
    for day in range(first, last + 1, step):
        x = at(day, 1.0)[0]
        parts.append(_segment(x, TOP, x, HEIGHT - BOTTOM))
        words = date.fromordinal(day).isoformat()
        parts.append(_text(x, HEIGHT - BOTTOM + 18, words[5:], "middle"))
    for power in range(y_low, y_high + 1):
        y = at(first, float(y_base) ** power)[1]
        parts.append(_segment(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 8, y + 4, _tick(y_base, power), "end"))
    for line in series:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.x, p.y) for p in line))
        parts.append(f'<polyline class="trend" points="{path}"/>')
    y = at(first, 1.0)[1]
    parts.append(f'<polyline class="axis" points="{LEFT},{y:.1f} {WIDTH - RIGHT},{y:.1f}"/>')
    parts += [_mark(*at(point.x, point.y), point) for point in shown]
    days = f"{date.fromordinal(first)} to {date.fromordinal(last)}"
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, f"day, {days}", "middle"))
    parts.append(_y_title(y_title))
    what = f"{len(series)} lines of {len(shown)} points; days across, {y_title} up."
    return _figure(title, what, HEIGHT, parts, caption)


def strips(
    title: str,
    groups: Sequence[tuple[str, Sequence[tuple[str, Sequence[float], bool]]]],
    caption: str = "",
) -> str:
    """Marks along a line for each contestant of a group; each group has its own scale.

    A group is a label and its contestants: a name, ascending values, and whether the marks are
    those of a peer.
    """
    parts, y = [], float(TOP)
    for label, contestants in groups:
        values = [value for _, found, _ in contestants for value in found]
        low, high = min(values), max(values)
        width = high - low or low * 0.01 or 1.0
        for line in _wrapped(label):
            parts.append(_text(0, y + 11, line, "start"))
            y += _LABEL
        for name, found, is_peer in contestants:
            words = f"{name}: {figure(found[0])} to {figure(found[-1])} \u00b5s"
            parts.append(f'<text class="dim" x="10" y="{y + 11}">{text(words)}</text>')
            y += _LABEL
            parts.append(_segment(10, y + 6, WIDTH - 10, y + 6))
            for value in found:
                x = 16 + (value - low) / width * (WIDTH - 32)
                parts.append(f'<circle class="{"poor" if is_peer else "good"} many" cx="{x:.1f}" '
                             f'cy="{y + 6}" r="4"/>')  # fmt: skip
            y += _LABEL
        y += 8
    return _figure(title, f"Strips of {len(groups)} problems.", y + 4, parts, caption)


def bars(
    title: str,
    groups: Iterable[tuple[str, Sequence[float | None], str]],
    series: Sequence[str] = (),
    caption: str = "",
    mark: float | None = None,
) -> str:
    """Horizontal bars from 0: a label above, and a value for each of ``series``.

    A group is the label, its values, and words that stand after the label. None leaves a bar out.
    ``mark`` draws a line across each bar at that value.
    """
    listed = list(groups)
    largest = max((v for _, values, _ in listed for v in values if v is not None), default=1) or 1
    scale = (WIDTH - _VALUE) / max(largest, mark or 0)
    parts, y = [], float(TOP)
    for i, name in enumerate(series):
        parts.append(
            f'<rect class="{"abc"[i]}" x="{i * WIDTH // 3}" y="{y}" width="11" height="11"/>'
        )
        parts.append(_text(i * WIDTH // 3 + 16, y + 10, name, "start"))
    y += 24 if series else 0
    for label, values, words in listed:
        for line in _wrapped(f"{label}  {words}"):
            parts.append(_text(0, y + 11, line, "start"))
            y += _LABEL
        first = y
        for i, value in enumerate(values):
            if value is not None:
                long = max(value * scale, 1)
                parts.append(f'<rect class="{"abc"[i]}" x="0" y="{y}" width="{long:.1f}" '
                             f'height="{_BAR}"/>')  # fmt: skip
                parts.append(_text(long + 5, y + _BAR - 1, figure(value), "start"))
                y += _BAR + 2
        if mark is not None:
            parts.append(f'<line class="axis" x1="{mark * scale:.1f}" y1="{first}" '
                         f'x2="{mark * scale:.1f}" y2="{y}"/>')  # fmt: skip
        y += 7
    return _figure(title, f"Bars of {len(listed)} lines.", y + 4, parts, caption)


def _wrapped(words: str) -> list[str]:
    """``words`` in lines that fit the width of a plot."""
    return wrap(words, WIDTH // 8) or [""]


def _figure(title: str, what: str, height: float, parts: Sequence[str], caption: str) -> str:
    body = "\n".join(parts)
    return (
        f"<figure><figcaption><b>{text(title)}.</b> {text(caption)}</figcaption>\n"
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{text(title)}. '
        f'{text(what)} The table below has the numbers.">\n{body}</svg></figure>\n'
    )


def _mark(x: float, y: float, point: Point) -> str:
    """A dot or a ring, whose tip is the label."""
    return (
        f'<circle class="{"good" if point.good else "poor"}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{text(point.label)}</title></circle>"
    )


def _y_title(words: str) -> str:
    return (
        f'<text transform="translate(16 {(HEIGHT - BOTTOM + TOP) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{text(words)}</text>'
    )


def _segment(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str, title: str = "") -> str:
    tip = f"<title>{text(title)}</title>" if title and title != words else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(words)}{tip}</text>'


def _tick(base: int, power: int) -> str:
    """``base ** power``; a long number as a power of ten."""
    if base == 10 and abs(power) > 4:
        return "10" + str(power).translate(_RAISED)
    return f"{float(base) ** power:g}"


def _powers(values: Sequence[float], base: int) -> tuple[int, int]:
    """The exponents of the powers of ``base`` around ``values``."""
    low, high = floor(log(min(values), base)), ceil(log(max(values), base))
    return low, max(high, low + 1)
