"""Groups of verbs: a misspelt verb gets suggestions, and a file that fails is named in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click

from kernelcat.cli.output import echo
from kernelcat.errors import nearest
from kernelcat.report.printable import printable


class Group(click.Group):
    """A group whose message about an unknown verb names the nearest ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            hint = nearest(args[0], self.list_commands(ctx))
            ctx.fail(printable(f"no command is called {args[0]!r}{hint}"))
        return super().resolve_command(ctx, args)


class Program(Group):
    """The outermost group: prints what the system says of a file, or of a full output, in one line.

    Other errors of the operating system are faults of this program, and keep their traceback.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            with _short_warnings():
                return super().main(*args, **options)
        except OSError as error:
            if error.filename is not None:
                message = f"{error.filename}: {error.strerror}"
            elif error.errno == errno.ENOSPC:
                message = f"standard output: {error.strerror}"
                _discard_output()
            else:
                raise
            echo(f"Error: {message}", err=True)
            sys.exit(1)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Show a warning to the user without its place in the sources."""
    as_usual = warnings.formatwarning

    def short(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        line: str | None = None,
    ) -> str:  # fmt: skip
        if category is UserWarning:
            return f"Warning: {printable(str(message))}\n"
        return as_usual(message, category, filename, lineno, line)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = as_usual


def _discard_output() -> None:
    """Let Python write what it still holds for standard output to nowhere."""
    with contextlib.suppress(OSError, ValueError):  # standard output may be no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
