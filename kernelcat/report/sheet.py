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

        # Where a line is too long, names are folded. Numbers are not: all of a line are one cell,
        # which costs rich the time of one.
        numbers = range(len(self.headers))[self.numbers]
        widths = [max(map(cell_len, map(printable, cells))) for cells in self._columns()]

        def cells(line: Sequence[str]) -> list[Text]:
            shown = [printable(cell) for cell in line]
            padded = (" " * (widths[i] - cell_len(shown[i])) + shown[i] for i in numbers)
            shown[self.numbers] = ["  ".join(padded)] if numbers else []
            return list(map(Text, shown))

        table = Table(title=Text(printable(self.title)), title_justify="left", box=None,
                      pad_edge=False)  # fmt: skip
        for place, header in enumerate(cells(self.headers)):
            is_numbers = bool(numbers) and place == numbers.start
            width = cell_len(header.plain) if is_numbers else None
            table.add_column(header, overflow="fold", no_wrap=is_numbers, width=width)
        for line in self.lines:
            table.add_row(*cells(line))
        if self.total:
            table.add_row(*cells(self.total), style="bold")
        notes = printable("\n".join((*self.notes, "")))
        return Group(table, Text(notes, style="dim"))

    def markdown(self, command: str) -> str:
        """The table in GitHub's Markdown, with the ``command`` line that shows the table."""
        columns = range(len(self.headers))
        rule = ["---:" if column in columns[self.numbers] else "---" for column in columns]
        total = [tuple(f"**{cell}**" if cell else "" for cell in self.total)] if self.total else []
        lines = [
            "| " + " | ".join(map(markdown_cell, line)) + " |"
            for line in (self.headers, rule, *self.lines, *total)
        ]
        return "\n".join((*lines, "", " ".join((f"`{command}`:", *self.notes)), ""))


def markdown_cell(cell: str) -> str:
    """``cell`` in a cell of a table, or in a heading: no markup of HTML and no end of the cell."""
    text = printable(cell).replace("\n", " ").replace("|", "\\|")
    return text.replace("&", "&amp;").replace("<", "&lt;")
