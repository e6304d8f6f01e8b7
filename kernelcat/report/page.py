"""The leaderboard as one HTML file without scripts or other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kernelcat.report.board import Row
from kernelcat.report.grid import Grid, grids

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #6a737d; --line: #e3e6ea;
        --paper: #ffffff; --bar: #cfe8d5; --good: #1a7f37; --poor: #b35900; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #8b949e; --line: #30363d; --paper: #0d1117; --bar: #1f4a2c;
          --good: #56d364; --poor: #e3a04f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 76rem; margin: 3rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 2rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 0; }
p { color: var(--dim); margin: .2rem 0; font-size: .87rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0;
        font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; font-size: .82rem; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
td:nth-child(5) { background: linear-gradient(90deg, var(--bar) var(--share, 0%), transparent 0); }
tbody tr:hover { background: color-mix(in srgb, var(--line) 45%, transparent); }
tfoot td { font-weight: 700; border-bottom: 0; }
.good { color: var(--good); } .poor { color: var(--poor); }
"""
_FIRST_RATIO = 5
"""Index of the first column of ratios, which are green from 1 on and orange below 1."""


def to_html(rows: Sequence[Row], title: str = "kernelcat leaderboard") -> str:
    """The HTML page of ``rows``; the winner's cell has its configuration as a tooltip."""
    body = "".join(_section(grid) for grid in grids(rows)) or "<p>Nothing measured yet.</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _section(grid: Grid) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in grid.headers)
    lines = zip(grid.lines, grid.configs, grid.shares, strict=True)
    body = "\n".join(_line(line, config, share) for line, config, share in lines)
    notes = "\n".join(f"<p>{escape(note)}</p>" for note in grid.notes)
    return (
        f"<h2>{escape(grid.title)}</h2>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n'
        f"<tfoot>{_line(grid.mean, '', None)}</tfoot></table></div>\n{notes}\n"
    )


def _line(line: Sequence[str], config: str, share: float | None) -> str:
    cells = [f"<td>{escape(cell)}</td>" for cell in line[:_FIRST_RATIO]]
    if config:
        cells[1] = f'<td title="{escape(config)}">{escape(line[1])}</td>'
    cells += [_ratio(cell) for cell in line[_FIRST_RATIO:]]
    style = f' style="--share: {min(share, 1):.1%}"' if share is not None else ""
    return f"<tr{style}>{''.join(cells)}</tr>"


def _ratio(cell: str) -> str:
    if not cell:
        return "<td></td>"
    side = "good" if float(cell.rstrip("≈")) >= 1 else "poor"
    return f'<td class="{side}">{escape(cell)}</td>'
