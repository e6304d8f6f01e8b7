"""The option that names GPUs of this machine."""

from __future__ import annotations

import click

from kernelcat.errors import InvalidArgument
from kernelcat.runtime.devices import Devices


def _parse(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> Devices:
    if "all" in words:
        return "all"
    for word in words:
        if not word.isdecimal():
            raise InvalidArgument(f"--device {word}: write a GPU's number, or all")
    return tuple(map(int, words))


devices = click.option(
    "--device", "devices", multiple=True, metavar="N|all", callback=_parse,
    help="Number of a GPU of this machine, may be repeated; or all. The default is GPU 0.",
)  # fmt: skip
