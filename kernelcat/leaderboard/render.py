"""The leaderboard for a terminal, for programs and for the README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcat.errors import InvalidArgument
from kernelcat.leaderboard.board import Row, board, means
from kernelcat.leaderboard.grid import Grid, grids
from kernelcat.store import Measurement, shipped

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_BLOCK = re.compile(
    r"(?P<open><!-- leaderboard:(?P<entry>[\w.-]+):(?P<gpu>[\w.-]+)(?::(?P<regime>\w+))? -->)"
    r".*?(?P<close><!-- /leaderboard -->)",
    re.DOTALL,
)
_LEFT = 2
"""Leading columns that hold text; the others hold numbers."""


def table(rows: Sequence[Row]) -> Group:
    """Something ``rich.console.Console.print`` shows."""
    from rich.console import Group
    from rich.text import Text

    if not rows:
        return Group(Text("Nothing measured yet: run kernelcat tune ENTRY."))
    return Group(*(part for grid in grids(rows) for part in (_rich(grid), _footer(grid))))


def to_json(rows: Sequence[Row]) -> str:
    """``{"rows": [...], "means": {...}}``; ``means`` by ``entry/gpu/regime/kind``."""
    sections = dict.fromkeys(row.section for row in rows)
    total = {
        "/".join(section): asdict(means([row for row in rows if row.section == section]))
        for section in sections
    }
    return json.dumps({"rows": [asdict(row) for row in rows], "means": total}, indent=1)


def to_markdown(rows: Sequence[Row]) -> str:
    """Tables in GitHub's Markdown, with the command that shows the same."""
    if not rows:
        return "Nothing measured yet.\n"
    return "\n".join(_markdown(grid, rows[0]) for grid in grids(rows))


def render_readme(text: str, measurements: Iterable[Measurement]) -> str:
    """``text`` with every leaderboard block filled in anew.

    A block stands between ``<!-- leaderboard:gemm:h200 -->`` (``...:h200:eager`` for the other
    regime) and ``<!-- /leaderboard -->``.
    """
    rows = list(measurements)

    def fill(block: re.Match[str]) -> str:
        regime = block["regime"] or "graph"
        found = board(rows, gpu=block["gpu"], entry=block["entry"], regime=regime)
        return f"{block['open']}\n{to_markdown(found)}{block['close']}"

    return _BLOCK.sub(fill, text)


def update_readme(path: str | Path, measurements: Iterable[Measurement] | None = None) -> bool:
    """Fill in a file's leaderboard blocks from ``tuning_db/``; whether it changed.

    Raises
    ------
    InvalidArgument
        The file has no block.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        raise InvalidArgument(
            f"{path} has no leaderboard: add <!-- leaderboard:ENTRY:GPU --> and "
            "<!-- /leaderboard --> where it belongs"
        )
    new = render_readme(text, shipped() if measurements is None else measurements)
    if new != text:
        path.write_text(new, encoding="utf-8")
    return new != text


def _rich(grid: Grid) -> Table:
    from rich.table import Table

    found = Table(title=grid.title, title_justify="left", box=None, pad_edge=False)
    for column, header in enumerate(grid.headers):
        found.add_column(header, justify="left" if column < _LEFT else "right", no_wrap=True)
    for line in grid.lines:
        found.add_row(*line)
    found.add_row(*grid.mean, style="bold")
    return found


def _footer(grid: Grid) -> Text:
    from rich.text import Text

    return Text("\n".join((f"{grid.caption}.", *grid.notes, "")), style="dim")


def _markdown(grid: Grid, row: Row) -> str:
    rule = ["---" if column < _LEFT else "---:" for column in range(len(grid.headers))]
    mean = tuple(f"**{cell}**" if cell else "" for cell in grid.mean)
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in (grid.headers, rule, *grid.lines, mean)
    ]
    regime = "" if row.regime == "graph" else f" --regime {row.regime}"
    command = f"`kernelcat leaderboard {row.entry} --gpu {row.gpu}{regime}`"
    notes = " ".join((f"{command}: {grid.caption}.", *grid.notes))
    return "\n".join((*lines, "", notes, ""))
