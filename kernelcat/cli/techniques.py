"""The verb techniques: which techniques the catalog uses, and how we know."""

from __future__ import annotations

import click

from kernelcat.cli.options import as_json
from kernelcat.cli.output import echo, emit, show


@click.command()
@click.argument("name", required=False)
@click.option("--group", "group_name", help="List only this group of techniques.")
@as_json
def techniques(name: str | None, group_name: str | None, as_json: bool) -> None:
    """List techniques of GPU performance work, or explain the one called NAME.

    The list says where the catalog uses each technique, and the strongest evidence: measured, in
    machine code, tested, compiled only. The others are not used yet, or do not apply.

    \b
    Example:
      kernelcat techniques tma-multicast
    """
    from kernelcat.report.techniques import index, text

    if name:
        technique, group = index.find(name)
        if as_json:
            return emit(text.data(technique, group))
        return echo(text.detail(technique, group))
    groups = [index.find_group(group_name)] if group_name else index.GROUPS
    if as_json:
        return emit([text.data(each, group) for group in groups for each in group.techniques])
    show(text.sheet(groups).console())
