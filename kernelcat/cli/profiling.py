"""The verb that counts bytes: profile."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kernelcat import catalog
from kernelcat.cli.options import as_json, choose, language, variant
from kernelcat.cli.output import emit, show
from kernelcat.errors import KernelcatError, MissingDependency, Unsupported


@click.command()
@click.argument("entry")
@click.option("--problem", "name", help="Problem to profile; the first one by default.")
@language
@variant
@click.option("--profiles", "folder", type=click.Path(path_type=Path), help="Folder for results.")
@as_json
def profile(
    entry: str,
    name: str | None,
    language: str | None,
    variant: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Count the bytes each kernel moves from DRAM and L2 with cold caches, by Nsight Compute.

    \b
    Example:
      kernelcat profile multicast_gemm --problem 4096x4096x4096
    """
    from kernelcat import gpu, leaderboard, profiler, profiles

    found = catalog.entry(entry)
    problem = found.named(name) if name else next(iter(found.problems.values()))
    chosen = choose(entry, language, variant)
    here = gpu.detect()
    counted, failed = [], False
    for implementation in (i for i in chosen if i.serves(here.arch)):
        try:
            counted.append(profiler.profile(implementation, problem, here))
        except MissingDependency:
            raise  # so it would be with the others
        except Unsupported as error:
            click.echo(f"left out: {error}", err=True)
        except KernelcatError as error:
            failed = True
            click.echo(f"{implementation.name}: {error}", err=True)
        else:
            profiles.write(folder or profiles.local_folder(), counted[-1:])
    if as_json:
        emit(counted)
    elif counted:
        show(leaderboard.traffic_sheet(counted).console())
    if failed or not counted:
        sys.exit(1)
