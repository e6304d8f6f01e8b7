"""The verb that counts bytes: profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from kernelcat import catalog
from kernelcat.cli.options import as_json, choose, language, variant
from kernelcat.cli.output import echo, emit, show
from kernelcat.errors import InvalidArgument, KernelcatError, MissingDependency, Unsupported


@click.command()
@click.argument("entry")
@click.option(
    "--problem", "name", help="Problem to profile, a name or axis values; by default the first one."
)
@language
@variant
@click.option(
    "--config",
    "words",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value of a parameter, in place of the best one; may be repeated. Also a JSON object of "
    "several.",
)
@click.option(
    "--profiles",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder for results; by default $KERNELCAT_PROFILES or the user's data folder.",
)
@as_json
def profile(
    entry: str,
    name: str | None,
    language: str | None,
    variant: str | None,
    words: tuple[str, ...],
    folder: Path | None,
    as_json: bool,
) -> None:
    """Count the bytes that kernels move, with cold caches.

    Nsight Compute counts transfers to and from DRAM and L2; the table is in MB, --json in bytes.
    Each implementation runs in its best known configuration. --config replaces values of that
    configuration, for example to compare variants with equal tiles.

    \b
    Example:
      kernelcat profile multicast_gemm --config tile=128x256 --config cluster=2x1
    """
    from kernelcat.report import traffic
    from kernelcat.runtime import gpu
    from kernelcat.verify import profiler, profiles

    spec = catalog.entry(entry)
    problem = spec.named(name) if name else next(iter(spec.problems.values()))
    chosen, parameters = choose((entry,), language, variant), _parameters(words)
    detected = gpu.detect()
    counted, failed = [], False
    for implementation in (i for i in chosen if i.serves(detected.arch)):
        try:
            counted.append(profiler.profile(implementation, problem, detected, parameters))
        except MissingDependency:
            raise  # the other implementations would fail in the same way
        except Unsupported as error:
            echo(f"left out: {error}", err=True)
        except KernelcatError as error:
            failed = True
            echo(f"{implementation.name}: {error}", err=True)
        else:
            profiles.write(folder or profiles.local_folder(), counted[-1:])
    if as_json:
        emit(counted)
    elif counted:
        show(traffic.sheet(counted).console())
    if failed or not counted:
        sys.exit(1)


def _parameters(words: tuple[str, ...]) -> dict[str, Any]:
    """``KEY=VALUE`` and JSON objects as one mapping."""
    values: dict[str, Any] = {}
    for word in words:
        if word.startswith("{"):
            try:
                values |= json.loads(word)
            except ValueError as error:
                raise InvalidArgument(f"--config {word}: {error}") from error
            continue
        key, equals, value = word.partition("=")
        if not equals:
            raise InvalidArgument(f"--config {word}: give KEY=VALUE or a JSON object")
        values[key] = value
    return values
