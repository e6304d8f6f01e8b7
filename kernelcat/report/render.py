"""The leaderboard for a terminal, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kernelcat.report.board import Row, means
from kernelcat.report.grid import grids

if TYPE_CHECKING:
    from rich.console import Group

NOTHING = "Nothing measured yet"


def table(rows: Sequence[Row]) -> Group:
    """The leaderboard for ``rich.console.Console.print``."""
    from rich.console import Group

    if not rows:
        return Group(f"{NOTHING}: run kernelcat tune ENTRY.")
    compilers = sorted({row.other_compiler for row in rows if row.other_compiler})
    notes = [f"Measured with other compilers than this machine has: {'; '.join(compilers)}."]
    return Group(*(grid.sheet.console() for grid in grids(rows)), *(notes if compilers else []))


def to_json(rows: Sequence[Row]) -> str:
    """``{"rows": [...], "means": {...}}``; ``means`` by ``entry/gpu/regime/kind/state``."""
    sections = dict.fromkeys(row.section for row in rows)
    total = {
        "/".join(section): asdict(means([row for row in rows if row.section == section]))
        for section in sections
    }
    return json.dumps({"rows": [asdict(row) for row in rows], "means": total}, indent=1)


def to_markdown(rows: Sequence[Row], options: str = "") -> str:
    """Tables in GitHub's Markdown, each with the command line that shows it.

    ``options`` are appended to the command line.
    """
    if not rows:
        return f"{NOTHING}.\n"
    return "\n".join(grid.sheet.markdown(grid.command + options) for grid in grids(rows))
