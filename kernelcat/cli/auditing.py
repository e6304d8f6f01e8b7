"""The option --audit of the verb tune: how good the choices of tunes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kernelcat.cli.options import seconds
from kernelcat.cli.output import echo, emit, interrupted, show
from kernelcat.errors import InvalidArgument

AUDITED = ("problems", "languages", "variants")
"""Options of a tune that an audit takes as they are."""

options = (
    click.option(
        "--audit", is_flag=True,
        help="Measure how good tunes choose, against all legal configurations; stores no results.",
    ),
    click.option(
        "--out", "path", type=click.Path(path_type=Path, dir_okay=False),
        help="With --audit: file for the results; problems that it has are not audited again.",
    ),
    click.option(
        "--shipped", is_flag=True,
        help="With --audit: run nothing, show the audits that come with the package.",
    ),
)  # fmt: skip


def run(
    entry: str | None, path: Path | None, shipped: bool, as_json: bool, *, strategy: str,
    trials: int | None, budget: str | None, devices: Any, **others: Any,
) -> None:  # fmt: skip
    """Audit tunes of an entry, or show audits."""
    from kernelcat.report.audits import line, sheet
    from kernelcat.tune.audit import audit

    if shipped:
        return _show_shipped(entry, as_json)
    if entry is None:
        raise click.UsageError("Missing argument 'ENTRY'.")
    if devices == "all" or len(devices) > 1:
        raise InvalidArgument("an audit runs on one GPU: name one --device")
    unused = sorted(name for name, value in others.items() if name not in AUDITED and value)
    if unused:
        raise InvalidArgument(f"an audit has no use for these options: {', '.join(unused)}")
    chosen: dict[str, Any] = {name: others[name] or None for name in AUDITED}
    try:
        audited = audit(
            entry,
            strategies=None if strategy == "auto" else strategy.split(","),
            trials=trials,
            device=devices[0] if devices else 0,
            budget_s=None if budget is None else seconds(budget),
            path=path,
            report=lambda problem: echo(line(problem), err=True),
            **chosen,
        )
    except KeyboardInterrupt:
        interrupted("results", path)
    if as_json:
        return emit(audited.to_json())
    show(sheet(audited).console())


def _show_shipped(entry: str | None, as_json: bool) -> None:
    from kernelcat import catalog
    from kernelcat.report.audits import sheet
    from kernelcat.store.audits import shipped

    audits = shipped(entry and catalog.entry(entry).name)
    if as_json:
        return emit([audit.to_json() for audit in audits])
    for audit in audits:
        show(sheet(audit).console())
    if not audits:
        echo("No audits come with the package.")
