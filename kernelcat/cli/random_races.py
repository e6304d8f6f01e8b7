"""The verb regret: races on random problems."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from kernelcat.cli.options import as_json, note_missing_languages, seconds
from kernelcat.cli.output import echo, emit, interrupted, show


@click.command()
@click.argument("entry")
@click.option(
    "--random",
    "count",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    metavar="COUNT",
    help="Number of random problems.",
)
@click.option(
    "--seed", help="Hash of a commit, from which the problems follow; by default this checkout's."
)
@click.option("--unusual", is_flag=True, help="Draw sizes and options that no published model has.")
@click.option(
    "--tune",
    "tunes",
    type=click.IntRange(min=0),
    default=0,
    metavar="COUNT",
    help="Tune the first COUNT problems shortly too, and race what the tune chose.",
)
@click.option(
    "--peer", "peers", multiple=True, help="Race only this peer of ENTRY's; may be repeated."
)
@click.option("--budget", help="Begin no further problem after this time: 90s, 10m or 1h.")
@click.option(
    "--out",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the races; races that it has are not run again.",
)
@click.option(
    "--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU."
)
@click.option(
    "--shipped", is_flag=True, help="Run nothing: show the races that come with the package."
)
@click.option(
    "--left-out",
    is_flag=True,
    help="Run nothing: serve each measured problem without the rows of its bucket.",
)
@as_json
def regret(
    entry: str,
    count: int,
    seed: str | None,
    unusual: bool,
    tunes: int,
    peers: tuple[str, ...],
    budget: str | None,
    path: Path | None,
    device: int,
    shipped: bool,
    left_out: bool,
    as_json: bool,
) -> None:
    """Race what a program gets from ENTRY, untuned, on random problems.

    The problems are those that nobody tuned: sizes of published models and around them. Each races
    with ENTRY's peers, and with --tune against the choice of a short tune. A ratio of times below 1
    says that the best peer is faster; the table has a reason for each. Tunes take half a budget at
    most.

    \b
    Example:
      kernelcat regret gemm --random 40 --tune 12 --budget 10m
      kernelcat regret moe_mlp --out tuning_db/random/moe_mlp-h200.jsonl
      kernelcat regret gemm --shipped
      kernelcat regret gemm --left-out
    """  # fmt: skip
    from kernelcat.report.random_races import line, sheet
    from kernelcat.runtime.checkout import commit
    from kernelcat.tune.random_races import race_random

    if shipped:
        return _show_shipped(entry, as_json)
    if left_out:
        return _show_left_out(entry, as_json)
    note_missing_languages(entry)
    try:
        races = race_random(
            entry,
            commit() if seed is None else seed,
            count=count,
            unusual=unusual,
            tunes=tunes,
            peers=peers,
            device=device,
            budget_s=None if budget is None else seconds(budget),
            path=path,
            report=lambda race: echo(line(race), err=True),
        )
    except KeyboardInterrupt:
        interrupted("races", path)
    if as_json:
        return emit(races.to_json())
    show(sheet(races).console())


def _show_shipped(entry: str, as_json: bool) -> None:
    from kernelcat import catalog
    from kernelcat.report.random_races import overall, sheet
    from kernelcat.store.random_races import shipped

    files = shipped(catalog.entry(entry).name)
    if as_json:
        return emit([races.to_json() for races in files])
    for races in files:
        show(sheet(races).console())
    for text in overall(files):
        echo(text)
    if not files:
        echo(f"No races of {entry} on random problems come with the package.")


def _show_left_out(entry: str, as_json: bool) -> None:
    from kernelcat import catalog
    from kernelcat.report.left_out import left_out, sheet, skus

    specification = catalog.entry(entry)
    found = {sku: left_out(specification, sku) for sku in skus(specification)}
    if as_json:
        return emit({sku: [asdict(each) for each in results] for sku, results in found.items()})
    for sku, results in found.items():
        show(sheet(entry, sku, results).console())
    if not found:
        echo(f"No measured rows of {entry} come with the package.")
