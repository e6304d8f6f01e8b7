"""A table of text cells, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Sheet:
    """Cells by line and column. ``numbers`` is the slice of columns that hold numbers."""

    title: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]
    numbers: slice
    total: Sequence[str] = ()

    @property
    def _numeric(self) -> list[bool]:
        columns = range(len(self.headers))
        return [column in columns[self.numbers] for column in columns]

    def console(self) -> Group:
        """Something ``rich.console.Console.print`` shows."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for header, number in zip(self.headers, self._numeric, strict=True):
            table.add_column(header, justify="right" if number else "left", no_wrap=True)
        for line in self.lines:
            table.add_row(*line)
        if self.total:
            table.add_row(*self.total, style="bold")
        return Group(table, Text("\n".join((*self.notes, "")), style="dim"))

    def markdown(self, command: str) -> str:
        """GitHub's Markdown, with the ``command`` that shows the same."""
        rule = ["---:" if number else "---" for number in self._numeric]
        total = [tuple(f"**{cell}**" if cell else "" for cell in self.total)] if self.total else []
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
            for line in (self.headers, rule, *self.lines, *total)
        ]
        return "\n".join((*lines, "", " ".join((f"`{command}`:", *self.notes)), ""))
