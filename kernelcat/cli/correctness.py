"""Verbs that judge kernels: check, fuzz."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from kernelcat import catalog
from kernelcat.cli.options import (
    as_json,
    choose,
    language,
    open_device,
    problem_names,
    runnable,
    variant,
)
from kernelcat.cli.output import emit
from kernelcat.errors import Unsupported


@click.command()
@click.argument("entry", required=False)
@click.option("--all", "every", is_flag=True, help="Every entry.")
@language
@variant
@problem_names
@click.option("--fuzz", "fuzz_examples", default=0, help="Random problems besides the named ones.")
@click.option("--sanitize", default=0, help="Random problems under each compute-sanitizer tool.")
@click.option("--receipt", is_flag=True, help="Write a receipt for everything that passed.")
@click.option("--receipts", "folder", type=click.Path(path_type=Path), help="Folder for receipts.")
@click.option("--jobs", default=4, help="Implementations checked at once, a process each.")
@as_json
def check(
    entry: str | None,
    every: bool,
    language: str | None,
    variant: str | None,
    problems: tuple[str, ...],
    fuzz_examples: int,
    sanitize: int,
    receipt: bool,
    folder: Path | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Check implementations against the oracle (in Triton's interpreter where there is no GPU).

    \b
    Example:
      kernelcat check gemm --fuzz 200
    """
    from kernelcat import certify, receipts
    from kernelcat.device import Interpreter

    if every == (entry is not None):
        raise click.UsageError("name an entry, or give --all")
    device = open_device()
    names = catalog.names() if every else (str(entry),)
    found = runnable([i for n in names for i in choose(n, language, variant)], device)
    if receipt and isinstance(device, Interpreter):
        raise Unsupported("a receipt says what ran on a GPU, and there is none in this machine")
    outcomes = []
    for implementation, outcome in certify.run(
        found, device, problems, fuzz_examples=fuzz_examples, sanitize_examples=sanitize, jobs=jobs
    ):
        outcomes.append(outcome)
        if receipt and outcome.right:
            written = certify.receipt(implementation, outcome, device)
            receipts.write(folder or receipts.local_folder(), [written])
        if not as_json:
            _show(outcome)
    if as_json:
        emit(outcomes)
    if not all(o.passed for o in outcomes):
        sys.exit(1)


def _show(outcome: Any) -> None:
    word = "passed" if outcome.passed else "FAILED"
    notes = [f"{len(outcome.problems)} problems", f"{outcome.fuzz_examples} random examples"]
    notes += [f"{len(outcome.skipped)} not served"] if outcome.skipped else []
    notes += [f"{tool} {n}" for tool, n in outcome.sanitizer.items()]
    click.echo(f"{word}  {outcome.implementation}: {', '.join(notes)}")
    for failure in outcome.failures:
        click.echo(f"        {failure}")


@click.command()
@click.argument("entry")
@click.option("--examples", default=100, show_default=True, help="Random problems each.")
@click.option("--seed", default=0, show_default=True, help="The same seed draws the same ones.")
@click.option("--limit", type=int, help="Largest value of any size.")
@click.option("--kernels", default=16, show_default=True, help="Compiled variations drawn from.")
@click.option("--mirrored", is_flag=True, help="Keep arrays on the host: for compute-sanitizer.")
@language
@variant
@as_json
def fuzz(
    entry: str,
    examples: int,
    seed: int,
    limit: int | None,
    kernels: int,
    mirrored: bool,
    language: str | None,
    variant: str | None,
    as_json: bool,
) -> None:
    """Check random problems drawn from the entry's axes; a failure is shrunk to a small one.

    \b
    Example:
      kernelcat fuzz gemm --examples 500
    """
    from kernelcat.certify import INTERPRETED_SIZE
    from kernelcat.device import Interpreter
    from kernelcat.fuzz import fuzz

    device = open_device(mirrored)
    interpreted = isinstance(device, Interpreter)
    if limit is None and interpreted:
        limit = INTERPRETED_SIZE
    results = [
        fuzz(
            i,
            Interpreter.serving(i) if interpreted else device,
            examples,
            random_seed=seed,
            limit=limit,
            kernels=kernels,
        )
        for i in runnable(choose(entry, language, variant), device)
    ]
    if as_json:
        emit(results)
    else:
        for result in results:
            click.echo(f"{result.implementation}: {result.examples} passed")
            if result.failure:
                click.echo(f"  FAILED  {result.failure}")
    if any(result.failure for result in results):
        sys.exit(1)
