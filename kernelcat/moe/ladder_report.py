"""The ladder of a model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, log10

from kernelcat.moe.ladder import Result
from kernelcat.report.sheet import Sheet
from kernelcat.report.svg import DIM, GRID, INK, page, text

WIDTH, ROW, TOP, BOTTOM = 880, 30, 84, 48
LEFT, RIGHT = 160, 40
"""Pixels: the picture, a line, and the margins around the plot."""
COLORS = ("#0969da", "#1a7f37", "#b35900", "#8250df", "#cf222e", "#57606a")
"""A color for each batch of the plot; with more batches the colors repeat."""


def batches_of(results: Sequence[Result]) -> list[int]:
    """All batches that were measured, ascending."""
    return sorted({one.batch for result in results for one in result.decoding})


def _rates(result: Result) -> dict[int, float]:
    return {one.batch: one.tokens_per_second for one in result.decoding}


# ---- the table ----------------------------------------------------------------------------------


def sheet(results: Sequence[Result], title: str) -> Sheet:
    """A line for each rung; those that were not run have their reason."""
    batches = batches_of(results)
    rates = [cell for batch in batches for cell in (f"tokens/s at {batch}", "×")]
    headers = ("rung", *rates, "TTFT ms", "×", "memory GB", "KL", "")
    reference = next((result.reference for result in results if result.reference), "")
    notes = ["×: beside the rung that was run before; above 1 this one is faster."]
    if reference:
        notes.append(
            f"KL: nats from the next tokens of rung {reference!r}, the last one without float8."
        )
    return Sheet(title, headers, [_line(r, batches) for r in results], notes, slice(1, -1))


def _line(result: Result, batches: Sequence[int]) -> list[str]:
    rates, cells = _rates(result), [result.name]
    for batch in batches:
        cells += [_number(rates.get(batch), ",.1f"), _number(result.effects.get(batch), ".2f")]
    memory = None if result.memory_bytes is None else result.memory_bytes / 1e9
    cells += [
        _number(result.ttft_ms, ".1f"), _number(result.ttft_effect, ".2f"), _number(memory, ".1f"),
        _number(result.divergence, ".1e"),
    ]  # fmt: skip
    return [*cells, _note(result)]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _note(result: Result) -> str:
    if result.reason:
        return f"not run: {result.short_reason}"
    if result.accepted is not None:
        return f"{result.accepted:.0%} of drafts accepted"
    return ""


# ---- the picture --------------------------------------------------------------------------------


def to_svg(results: Sequence[Result], title: str) -> str:
    """Tokens a second of each rung (a line) at each batch (a color), on a logarithmic axis."""
    batches = batches_of(results)
    height = TOP + ROW * len(results) + BOTTOM
    rates = [rate for result in results for rate in _rates(result).values()] or [1.0, 10.0]
    low, high = floor(log10(min(rates))), ceil(log10(max(rates)) + 1e-9)

    def x(rate: float) -> float:
        return LEFT + (log10(rate) - low) / max(1, high - low) * (WIDTH - LEFT - RIGHT)

    parts = [_tick(10.0**power, x(10.0**power), height) for power in range(low, high + 1)]
    ys = [TOP + ROW * (i + 0.5) for i in range(len(results))]
    for i, batch in enumerate(batches):
        color = COLORS[i % len(COLORS)]
        points = [
            (x(rates[batch]), y, rates[batch])
            for rates, y in zip(map(_rates, results), ys, strict=True)
            if batch in rates
        ]
        parts += [
            f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" '
            f'stroke="{color}" stroke-opacity=".35" stroke-width="2"/>'
            for a, b in pairwise(points)
        ]
        for at, y, rate in points:
            parts.append(f'<circle cx="{at:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>')
            parts.append(text(at + 8, y + 4, f"{rate:,.0f}", color, size=11))
        parts.append(f'<circle cx="{LEFT + 110 * i}" cy="{height - 24}" r="4.5" fill="{color}"/>')
        parts.append(text(LEFT + 10 + 110 * i, height - 20, f"batch {batch}", DIM))
    for result, y in zip(results, ys, strict=True):
        parts.append(text(LEFT - 14, y + 4, result.name, DIM if result.reason else INK, "end"))
        if result.reason:
            parts.append(text(LEFT + 8, y + 4, _note(result)[:100], DIM, size=11))
    described = "; ".join(
        f"{r.name} " + ", ".join(f"{rate:.0f} at {batch}" for batch, rate in _rates(r).items())
        for r in results
        if not r.reason
    )
    subtitle = "Output tokens a second while all requests write; each line adds one step."
    return page(WIDTH, height, title, subtitle, described, "\n".join(parts))


def _tick(rate: float, x: float, height: int) -> str:
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" stroke="{GRID}"/>'
    return line + text(x, TOP - 8, f"{rate:,g}", DIM, anchor="middle")
