"""Verbs about the compiled kernels that are kept on the disk: cache."""

from __future__ import annotations

import click

from kernelcat.cli.group import Group
from kernelcat.cli.options import as_json
from kernelcat.cli.output import echo, emit


@click.group(cls=Group)
def cache() -> None:
    """Show or empty the cache of compiled kernels.

    \b
    Example:
      kernelcat cache size
    """


@cache.command()
@as_json
def size(as_json: bool) -> None:
    """Print the folder of the cache, how many kernels it has, and their bytes.

    \b
    Example:
      kernelcat cache size
    """
    from kernelcat.jit import cache as artifacts

    sizes = artifacts.sizes()
    if as_json:
        return emit(
            {"folder": str(artifacts.folder()), "kernels": len(sizes), "bytes": sum(sizes.values())}
        )
    echo(f"{artifacts.folder()}: {len(sizes)} kernels, {sum(sizes.values()) / 1e6:.1f} MB")


@cache.command()
@as_json
def clear(as_json: bool) -> None:
    """Delete the compiled kernels; they are compiled again when they are needed.

    \b
    Example:
      kernelcat cache clear
    """
    from kernelcat.jit import cache as artifacts

    deleted = artifacts.clear()
    if as_json:
        return emit({"folder": str(artifacts.folder()), "deleted": deleted})
    echo(f"{artifacts.folder()}: {deleted} kernels deleted")
