"""Verbs that measure, or predict for a GPU that this machine does not have: tune, bench, ladder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernelcat.cli.devices import devices
from kernelcat.cli.options import as_json, problem_names, seconds
from kernelcat.cli.output import echo, emit, note_missing_database, show
from kernelcat.errors import InvalidArgument

_OPTIONS = (
    click.argument("entry"),
    click.option(
        "--gpu",
        help="SKU; by default this machine's GPU. For another SKU, times are predicted.",
    ),
    devices,
    problem_names,
    click.option(
        "--language", "languages", multiple=True, help="Use only this language; may be repeated."
    ),
    click.option(
        "--variant", "variants", multiple=True,
        help="Use only this variant; may be repeated.",
    ),
    click.option("--budget", help="Time for all problems together: 90s, 10m or 1h."),
    click.option(
        "--regime", "regimes", multiple=True, type=click.Choice(("graph", "eager")),
        help="graph: device time. eager: host time included. Both by default.",
    ),
    click.option(
        "--state", "states", multiple=True, type=click.Choice(("burst", "sustained")),
        help="burst: cool chip. sustained: hot chip. Both by default.",
    ),
    click.option("--no-peers", is_flag=True, help="Race without peers (cuBLAS and others)."),
    click.option(
        "--db", "url",
        help="Path or SQLAlchemy URL of the database; $KERNELCAT_DB by default.",
    ),
    as_json,
)  # fmt: skip


def _measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments that tune and bench share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_measuring
@click.option(
    "--strategy", default="auto", help="Search strategy: auto, exhaustive, random or halving."
)
@click.option("--fresh", is_flag=True, help="Ignore earlier results, failures included.")
def tune(as_json: bool, **options: Any) -> None:
    """Find the fastest configurations of ENTRY.

    The fastest ones race with each other and with ENTRY's peers, and all results are stored. A tune
    that was stopped resumes when it is started again.

    \b
    Example:
      kernelcat tune gemm --problem 4096x4096x4096 --budget 2m

    With several GPUs of one SKU (--device all), each GPU screens and races one problem at a time.
    """
    from kernelcat import tune

    _measure(tune.tune, as_json, **options)


@click.command()
@_measuring
@click.option(
    "--random",
    "count",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="Race what a program gets, untuned, on this many random problems.",
)
@click.option(
    "--seed",
    help="Hash of the commit, from which random problems follow; by default this checkout's.",
)
@click.option(
    "--out",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the races on random problems; races that it has are not run again.",
)
def bench(
    as_json: bool, count: int | None, seed: str | None, path: Path | None, **options: Any
) -> None:
    """Race the best known configurations of ENTRY with its peers.

    With --random each problem has one configuration, the one that a program gets. A ratio of times
    below 1 then says that the best peer is faster.

    \b
    Example:
      kernelcat bench gemm --problem 4096x4096x4096
      kernelcat bench moe_mlp --random 40 --out tuning_db/random/moe_mlp-nvidia-h200.jsonl
    """
    from kernelcat import tune
    from kernelcat.cli import random_races

    if count is not None:
        return random_races.run(count, seed, path, as_json, **options)
    if seed is not None or path is not None:
        raise InvalidArgument("--seed and --out are for --random")
    _measure(tune.race_best_known, as_json, **options)


@click.command()
@click.argument("entries", metavar="ENTRY...", nargs=-1, required=True)
@click.option("--problem", help="Show only this problem.")
@click.option("--gpu", help="Show only this SKU.")
@click.option(
    "--measure",
    is_flag=True,
    help="First race every variant on this machine's GPU; needs --problem.",
)
@click.option(
    "--db", "url", help="Path or SQLAlchemy URL of the database; $KERNELCAT_DB by default."
)
@as_json
def ladder(
    entries: tuple[str, ...],
    problem: str | None,
    gpu: str | None,
    measure: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the speedup of each variant of ENTRY.

    A ladder is one race of all variants, from the naive kernels on. Each variant is compared with
    the variant before. Times are in microseconds.

    \b
    Example:
      kernelcat ladder gemm multicast_gemm --problem 4096x4096x4096 --measure
    """
    from kernelcat import tune
    from kernelcat.report.board import load
    from kernelcat.report.ladder import ladders, sheet
    from kernelcat.runtime import gpu as gpus

    if measure and problem is None:
        raise InvalidArgument(
            "name a --problem to measure: naive kernels take seconds for large ones"
        )
    if measure:
        for entry in entries:
            raced = _run(tune.ladder, as_json, url, entry, problems=[problem])
            reasons = [f"{name}: skipped, {why}" for name, why in raced.skipped.items()]
            for line in (*reasons, *raced.notes):
                echo(line, err=True)
    sku = gpus.find(gpu).sku if gpu else None
    shown = []
    for entry in entries:
        rows = load(sku, entry, "graph", url)
        shown += ladders(rows, entry, sku, problem)
    if url is None:
        note_missing_database()
    if as_json:
        return emit(shown)
    if url is None:
        note_missing_database()
    if not shown:
        echo("Nothing measured yet: give --problem and --measure.")
    for each in shown:
        show(sheet(each).console())


def _measure(
    work: Callable[..., Any], as_json: bool, entry: str, url: str | None, budget: str | None,
    no_peers: bool, **options: Any,
) -> None:  # fmt: skip
    chosen = {name: value for name, value in options.items() if value}
    budget_s = None if budget is None else seconds(budget)
    report = _run(work, as_json, url, entry, budget_s=budget_s, peers=not no_peers, **chosen)
    if as_json:
        return emit(report.to_json())
    for line in report.lines():
        echo(line)


def _run(
    work: Callable[..., Any], as_json: bool, url: str | None, entry: str, **options: Any
) -> Any:
    """Call ``work`` with an open database and return its report.

    Ctrl-C ends the program with one line about the results that were stored.
    """
    from kernelcat.store import Store
    from kernelcat.tune import Interrupted, Quiet

    with Store.open(url) as store:
        try:
            return work(entry, store=store, progress=Quiet() if as_json else None, **options)
        except Interrupted as stopped:
            echo(f"\n{stopped}", err=True)
            sys.exit(130)
