"""A table of text cells, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelcat.report.printable import printable

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Sheet:
    """A table of text cells. Text is shown as it is: neither markup nor escapes are obeyed.

    Attributes
    ----------
    lines : cells by line and column
    notes : sentences below the table
    numbers : the columns that hold numbers
    total : cells of the last line, in bold; may be empty
    """

    title: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]
    numbers: slice
    total: Sequence[str] = ()

    @property
    def _is_number(self) -> list[bool]:
        """For each column, whether it holds numbers."""
        columns = range(len(self.headers))
        return [column in columns[self.numbers] for column in columns]

    def _columns(self) -> Iterable[Sequence[str]]:
        """The cells of each column, the header first."""
        lines = [self.headers, *self.lines, *([self.total] if self.total else [])]
        return zip(*lines, strict=True)

    def console(self) -> Group:
        """The table for ``rich.console.Console.print``."""
        from rich.cells import cell_len
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def text(cell: str) -> Text:
            return Text(printable(cell))

        table = Table(title=text(self.title), title_justify="left", box=None, pad_edge=False)
        for header, is_number in zip(self.headers, self._is_number, strict=True):
            table.add_column(text(header), justify="right" if is_number else "left", no_wrap=True)
        for line in self.lines:
            table.add_row(*map(text, line))
        for column, cells in zip(table.columns, self._columns(), strict=True):
            # Numbers are never cut: where the line is too long, names are folded.
            column.overflow = "fold"
            column.no_wrap = column.justify == "right"
            column.min_width = max(map(cell_len, cells)) if column.no_wrap else None
        if self.total:
            table.add_row(*map(text, self.total), style="bold")
        notes = printable("\n".join((*self.notes, "")))
        return Group(table, Text(notes, style="dim"))

    def markdown(self, command: str) -> str:
        """The table in GitHub's Markdown, with the ``command`` line that shows the table."""
        rule = ["---:" if is_number else "---" for is_number in self._is_number]
        total = [tuple(f"**{cell}**" if cell else "" for cell in self.total)] if self.total else []
        lines = [
            "| " + " | ".join(map(_markdown_cell, line)) + " |"
            for line in (self.headers, rule, *self.lines, *total)
        ]
        return "\n".join((*lines, "", " ".join((f"`{command}`:", *self.notes)), ""))


def _markdown_cell(cell: str) -> str:
    """``cell`` in one cell of a table: no markup of HTML and no end of the cell."""
    text = printable(cell).replace("\n", " ").replace("|", "\\|")
    return text.replace("&", "&amp;").replace("<", "&lt;")
