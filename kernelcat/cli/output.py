"""Printing, for every verb: JSON with ``--json``, else lines or a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import click

from kernelcat.report.printable import printable


def emit(value: Any) -> None:
    """Print ``value`` (data classes, mappings, lists of them) as JSON."""
    click.echo(json.dumps(value, default=_plain, indent=1))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)


def echo(text: str, err: bool = False) -> None:
    """Print lines; escapes in the text are shown, not obeyed. ``err``: to standard error."""
    click.echo(printable(text), err=err)


def show(renderable: Any) -> None:
    """Print a rich renderable, up to 200 columns wide where the output is not a terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(renderable)
