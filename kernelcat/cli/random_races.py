"""The option --random of the verb bench: races on random problems."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kernelcat.cli.options import seconds
from kernelcat.cli.output import echo, emit, show
from kernelcat.errors import InvalidArgument
from kernelcat.runtime.devices import Devices


def run(
    count: int,
    seed: str | None,
    path: Path | None,
    as_json: bool,
    entry: str,
    budget: str | None,
    devices: Devices,
    **others: Any,
) -> None:
    """Race ``count`` random problems of ``entry`` and print the table; a line for each meanwhile.

    ``others`` are options of ``bench`` that do not go with random problems.
    """
    from kernelcat.report.random_races import line, sheet
    from kernelcat.runtime.checkout import commit
    from kernelcat.tune.random_races import race_random

    for name, value in others.items():
        if value:
            raise InvalidArgument(
                f"--random does not go with {_flag(name)}: a program chooses by itself, and "
                "$KERNELCAT_DB names its database"
            )
    if devices == "all" or len(devices) > 1:
        raise InvalidArgument("--random races on one GPU: name one --device")
    try:
        races = race_random(
            entry,
            commit() if seed is None else seed,
            count=count,
            device=devices[0] if devices else 0,
            budget_s=None if budget is None else seconds(budget),
            path=path,
            report=lambda race: echo(f"{line(race)}", err=True),
        )
    except KeyboardInterrupt:
        kept = "lost" if path is None else f"kept in {path}; run the command again to go on"
        echo(f"\ninterrupted: races so far are {kept}", err=True)
        sys.exit(130)
    if as_json:
        return emit(races.to_json())
    show(sheet(races).console())


def _flag(name: str) -> str:
    """``no_peers`` -> ``--no-peers``; the destinations of repeated options are plural."""
    flags = {"problems": "problem", "languages": "language", "variants": "variant",
             "regimes": "regime", "states": "state", "url": "db"}  # fmt: skip
    return f"--{flags.get(name, name).replace('_', '-')}"
