"""The leaderboard for a terminal, as JSON, CSV and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from kernelcat.report.board import Row, means
from kernelcat.report.grid import grids

if TYPE_CHECKING:
    from rich.console import Group

NOTHING = "Nothing measured yet"


def table(rows: Sequence[Row], remarks: Sequence[str] = ()) -> Group:
    """The leaderboard for ``rich.console.Console.print``, with ``remarks`` at its end."""
    from rich.console import Group

    if not rows:
        return Group(f"{NOTHING}: run kernelcat tune ENTRY.", *remarks)
    compilers = sorted({row.other_compiler for row in rows if row.other_compiler})
    notes = [f"Measured with other compilers than this machine has: {'; '.join(compilers)}."]
    sheets = (grid.sheet.console() for grid in grids(rows))
    return Group(*sheets, *(notes if compilers else []), *remarks)


def to_json(rows: Sequence[Row]) -> str:
    """``{"rows": [...], "means": {...}}``; ``means`` by ``entry/gpu/regime/kind/state``."""
    sections = dict.fromkeys(row.section for row in rows)
    total = {
        "/".join(section): asdict(means([row for row in rows if row.section == section]))
        for section in sections
    }
    return json.dumps({"rows": [asdict(row) for row in rows], "means": total}, indent=1)


def to_csv(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Names of the columns, and values by row and column; what is unknown is None.

    The columns are the fields of :class:`~kernelcat.report.board.Row`. Mappings and sequences are
    JSON, except the interval, which is ``ci_low_us`` and ``ci_high_us``.
    """
    names = [name for field in fields(Row) for name in _COLUMNS.get(field.name, (field.name,))]
    return names, [_values(row) for row in rows]


_COLUMNS = {"ci_us": ("ci_low_us", "ci_high_us")}


def _values(row: Row) -> list[Any]:
    values: list[Any] = []
    for name, value in asdict(row).items():
        if name in _COLUMNS:
            values += value or [None] * len(_COLUMNS[name])
        else:
            is_plain = value is None or isinstance(value, str | float | int)
            values.append(value if is_plain else json.dumps(value))
    return values


def to_markdown(rows: Sequence[Row], options: str = "") -> str:
    """Tables in GitHub's Markdown, each with the command line that shows it.

    ``options`` are appended to the command line.
    """
    if not rows:
        return f"{NOTHING}.\n"
    return "\n".join(grid.sheet.markdown(grid.command + options) for grid in grids(rows))
