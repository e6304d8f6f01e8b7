"""Verbs that measure, or predict for a GPU that is not here: tune, bench, ladder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from kernelcat.cli.devices import devices
from kernelcat.cli.options import as_json, problem_names, seconds
from kernelcat.cli.output import emit, show
from kernelcat.errors import InvalidArgument

_OPTIONS = (
    click.argument("entry"),
    click.option("--gpu", help="SKU; this machine's GPU by default. Another is cross-tuned."),
    devices,
    problem_names,
    click.option(
        "--language", "languages", multiple=True, help="Only this language; repeatable."
    ),
    click.option("--variant", "variants", multiple=True, help="Only this variant; repeatable."),
    click.option("--budget", help="Time for all problems together: 90s, 10m, 1h."),
    click.option(
        "--regime", "regimes", multiple=True, type=click.Choice(("graph", "eager")),
        help="Device time, or host time included; both by default.",
    ),
    click.option(
        "--state", "states", multiple=True, type=click.Choice(("burst", "sustained")),
        help="Cool chip, or hot chip; both by default.",
    ),
    click.option("--no-peers", is_flag=True, help="Race without other people's kernels."),
    click.option("--db", "url", help="Database path or SQLAlchemy URL."),
    as_json,
)  # fmt: skip


def _measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that tune and bench share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_measuring
@click.option("--strategy", default="auto", help="auto, exhaustive, random or halving.")
@click.option("--fresh", is_flag=True, help="Forget earlier results, failures included.")
def tune(as_json: bool, **options: Any) -> None:
    """Find the fastest configurations of ENTRY, race them with its peers, and keep the results.

    A tune that is stopped goes on from there when it is started again.

    \b
    Example:
      kernelcat tune gemm --problem 4096x4096x4096 --budget 2m

    With several GPUs of one kind (--device all) each takes one problem at a time, screens and
    races it alone, and takes the next.
    """
    from kernelcat import tune

    _measure(tune.tune, as_json, **options)


@click.command()
@_measuring
def bench(as_json: bool, **options: Any) -> None:
    """Race the best known configurations of ENTRY with its peers, without a search.

    \b
    Example:
      kernelcat bench gemm --problem 4096x4096x4096
    """
    from kernelcat import tune

    _measure(tune.race_best_known, as_json, **options)


@click.command()
@click.argument("entries", metavar="ENTRY...", nargs=-1, required=True)
@click.option("--problem", help="Only this problem.")
@click.option("--gpu", help="Only this SKU.")
@click.option("--measure", is_flag=True, help="First race every variant on this machine's GPU.")
@click.option("--db", "url", help="Database path or SQLAlchemy URL.")
@as_json
def ladder(
    entries: tuple[str, ...],
    problem: str | None,
    gpu: str | None,
    measure: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Show what each step of ENTRY's ladder brings, naive kernels and all, from one race.

    \b
    Example:
      kernelcat ladder gemm multicast_gemm --problem 4096x4096x4096 --measure
    """
    from kernelcat import tune
    from kernelcat.report.board import load
    from kernelcat.report.ladder import ladders, sheet
    from kernelcat.runtime import gpu as gpus

    if measure and problem is None:
        raise InvalidArgument("name a --problem to measure: naive kernels take seconds on some")
    if measure:
        for entry in entries:
            raced = _run(tune.ladder, as_json, url, entry, problems=[problem])
            reasons = [f"{name}: skipped, {why}" for name, why in raced.skipped.items()]
            for line in (*reasons, *raced.notes):
                click.echo(line, err=True)
    sku = gpus.find(gpu).sku if gpu else None
    found = []
    for entry in entries:
        rows = load(sku, entry, "graph", url)
        found += ladders(rows, entry, sku, problem)
    if as_json:
        return emit(found)
    if not found:
        click.echo("Nothing measured yet: name a problem, and give --measure.")
    for climbed in found:
        show(sheet(climbed).console())


def _measure(
    work: Callable[..., Any], as_json: bool, entry: str, url: str | None, budget: str | None,
    no_peers: bool, **options: Any,
) -> None:  # fmt: skip
    chosen = {name: value for name, value in options.items() if value}
    budget_s = seconds(budget) if budget else None
    report = _run(work, as_json, url, entry, budget_s=budget_s, peers=not no_peers, **chosen)
    if as_json:
        return emit(report.to_json())
    for line in report.lines():
        click.echo(line)


def _run(
    work: Callable[..., Any], as_json: bool, url: str | None, entry: str, **options: Any
) -> Any:
    """The report of ``work``; Ctrl-C ends the program with a line that says what is kept."""
    from kernelcat.store import Store
    from kernelcat.tune import Interrupted, Quiet

    with Store.open(url) as store:
        try:
            return work(entry, store=store, progress=Quiet() if as_json else None, **options)
        except Interrupted as stopped:
            click.echo(f"\n{stopped}", err=True)
            sys.exit(130)
