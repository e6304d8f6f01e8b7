"""The command line: a module for each group of verbs.

A module belongs here if it parses arguments and prints results; the work is done elsewhere. Every
verb has ``--json``, and an example in its help.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from kernelcat import __version__
from kernelcat.cli.group import Program
from kernelcat.errors import KernelcatError
from kernelcat.report.printable import printable

_VERBS = {
    "list": "catalog:list_",
    "show": "catalog:show",
    "inspect": "catalog:inspect",
    "explain": "catalog:explain",
    "techniques": "techniques:techniques",
    "doctor": "catalog:doctor",
    "new": "catalog:new",
    "check": "correctness:check",
    "fuzz": "correctness:fuzz",
    "tune": "tuning:tune",
    "bench": "tuning:bench",
    "regret": "random_races:regret",
    "predict": "prediction:predict",
    "calibrate": "prediction:calibrate",
    "ladder": "tuning:ladder",
    "profile": "profiling:profile",
    "build": "ahead:build",
    "lock": "ahead:lock",
    "receipts": "receipts:receipts",
    "leaderboard": "database:leaderboard",
    "export": "exchange:export",
    "db": "database:db",
    "cache": "cache:cache",
    "moe": "moe:moe",
    "completion": "completion:completion",
}
"""Verb -> module and command; a module is imported when one of its verbs is used."""


class _Group(Program):
    """Imports a verb when it is used, and prints a ``KernelcatError`` as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        module, _, attribute = _VERBS[name].partition(":")
        command: click.Command = getattr(
            importlib.import_module(f"kernelcat.cli.{module}"), attribute
        )
        if ctx.resilient_parsing:  # a shell asks what could come next
            from kernelcat.cli.completion import attach

            return attach(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KernelcatError as error:
            raise click.ClickException(printable(str(error))) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernelcat")
def main() -> None:
    """A catalog of GPU kernels in three languages, with an autotuning database.

    \b
    Example:
      kernelcat tune gemm --problem 4096x4096x4096
    """
