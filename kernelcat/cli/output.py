"""Printing, for every verb: JSON with ``--json``, else lines or a table."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from kernelcat.errors import KernelcatError
from kernelcat.report.printable import printable


def interrupted(what: str, path: Path | None) -> NoReturn:
    """Say after Ctrl-C whether ``what`` is kept in ``path``, and end the program."""
    kept = "lost" if path is None else f"kept in {path}; run the command again to go on"
    echo(f"\ninterrupted: {what} so far are {kept}", err=True)
    sys.exit(130)


def emit(value: Any) -> None:
    """Print ``value`` (data classes, mappings, lists of them) as JSON."""
    click.echo(_json(value))


def save(path: Path, value: Any) -> None:
    """Write what :func:`emit` prints to ``path``, in one step; ``KernelcatError`` if it fails."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(f"{_json(value)}\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise KernelcatError(f"{path} cannot be written: {error.strerror}") from error


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, indent=1)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)


def echo(text: str, err: bool = False) -> None:
    """Print lines; escapes in the text are shown, not obeyed. ``err``: to standard error."""
    click.echo(printable(text), err=err)


def write_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print CSV with a line of column names; escapes in values are shown, not obeyed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    click.echo(printable(text.getvalue()), nl=False)


def stream(text: str) -> None:
    """Print ``text`` at once, without a line end; escapes are shown, not obeyed."""
    click.echo(printable(text), nl=False)


def show(renderable: Any) -> None:
    """Print a rich renderable, up to 200 columns wide where the output is not a terminal.

    What does not fit is printed wider than the terminal, and not cut.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=None if sys.stdout.isatty() else 200)
    endless = console.options.update(width=1 << 14)
    console.width = max(console.width, Measurement.get(console, endless, renderable).minimum)
    console.print(renderable)


def note_missing_database() -> None:
    """Print one line to standard error if ``$KERNELCAT_DB`` names a file that is not there."""
    from kernelcat.store.location import VARIABLE, locate

    location = locate()
    if location.named and location.path is not None and not location.path.exists():
        click.echo(f"{VARIABLE} names {location}, which does not exist: only shipped results are "
                   "shown", err=True)  # fmt: skip
