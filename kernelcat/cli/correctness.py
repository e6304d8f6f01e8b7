"""Verbs that judge kernels: check, fuzz."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelcat import catalog
from kernelcat.cli.devices import devices
from kernelcat.cli.options import (
    as_json,
    choose,
    language,
    open_device,
    problem_names,
    runnable,
    variant,
)
from kernelcat.cli.output import echo, emit
from kernelcat.errors import InvalidArgument, Unsupported
from kernelcat.runtime.devices import Devices
from kernelcat.verify.sanitizer import SANITIZERS

if TYPE_CHECKING:
    from kernelcat.catalog.implementation import Implementation
    from kernelcat.verify.certify import Outcome
    from kernelcat.verify.receipts import Receipt

    _Found = tuple[Outcome, Callable[[], Receipt]]

COUNT, AT_LEAST_ONE = click.IntRange(min=0), click.IntRange(min=1)


@click.command()
@click.argument("entry", required=False)
@click.option("--all", "every", is_flag=True, help="Check every entry.")
@language
@variant
@problem_names
@click.option(
    "--fuzz",
    "fuzz_examples",
    type=COUNT,
    default=0,
    help="Number of random problems after the named ones.",
)
@click.option(
    "--sanitize",
    type=COUNT,
    default=0,
    help="Number of random problems for each compute-sanitizer tool.",
)
@click.option(
    "--tool",
    "tools",
    type=click.Choice(SANITIZERS),
    multiple=True,
    help="Run only this compute-sanitizer tool; may be repeated.",
)
@click.option(
    "--receipt",
    is_flag=True,
    help="Write a receipt for each implementation whose results were all right.",
)
@click.option(
    "--receipts",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder for receipts; by default $KERNELCAT_RECEIPTS or the user's data folder.",
)
@devices
@click.option(
    "--jobs",
    default=4,
    help="Implementations checked at once on each GPU; for a single implementation, processes that "
    "compile.",
)
@as_json
def check(
    entry: str | None,
    every: bool,
    language: str | None,
    variant: str | None,
    problems: tuple[str, ...],
    fuzz_examples: int,
    sanitize: int,
    tools: tuple[str, ...],
    receipt: bool,
    folder: Path | None,
    devices: Devices,
    jobs: int,
    as_json: bool,
) -> None:
    """Check implementations against the oracle of their entry.

    Without a GPU, Triton kernels run in Triton's interpreter.

    \b
    Example:
      kernelcat check gemm --fuzz 200
    """
    from kernelcat.runtime.device import CudaDevice, Interpreter
    from kernelcat.verify import certify, receipts

    if every == (entry is not None):
        raise click.UsageError("name an entry, or give --all")
    if receipt and tools and set(tools) != set(SANITIZERS):
        raise click.UsageError("a receipt takes every tool: leave out --tool")
    numbers = _numbers(devices)
    device = CudaDevice(numbers[0]) if devices else open_device()
    names = catalog.names() if every else (str(entry),)
    named = choose(names, language, variant)
    if tools and all(catalog.entry(each.entry).ranks for each in named):
        _require_tools_of_ranks(tools)
    chosen = runnable(named, device)
    if receipt and isinstance(device, Interpreter):
        raise Unsupported("a receipt needs a GPU, and this machine has none")
    alone = [i for i in chosen if not catalog.entry(i.entry).ranks]
    together = [i for i in chosen if catalog.entry(i.entry).ranks]
    outcomes = []
    sanitize = sanitize or (certify.SANITIZED_EXAMPLES if tools else 0)
    certified = certify.run(
        alone, device, problems, fuzz_examples=fuzz_examples, sanitize_examples=sanitize, jobs=jobs,
        devices=numbers, tools=tools or SANITIZERS,
    )  # fmt: skip
    singly = ((outcome, partial(certify.receipt, implementation, outcome, device))
              for implementation, outcome in certified)  # fmt: skip
    found: Iterable[_Found] = chain(
        singly,
        _checked_together(
            together, problems, devices, fuzz_examples, sanitize, tools or SANITIZERS
        ),
    )
    for outcome, make_receipt in found:
        outcomes.append(outcome)
        if receipt and outcome.right:
            receipts.write(folder or receipts.local_folder(), [make_receipt()])
        if not as_json:
            _show(outcome)
    if as_json:
        emit(outcomes)
    if not all(o.passed for o in outcomes):
        sys.exit(1)


def _checked_together(
    implementations: list[Implementation],
    problems: tuple[str, ...],
    devices: Devices,
    fuzz_examples: int,
    sanitize_examples: int,
    tools: tuple[str, ...],
) -> Iterator[_Found]:
    """Check implementations of entries of several ranks, on all GPUs by default.

    Yields outcomes, and what makes a receipt of one.
    """
    from kernelcat.ranks import check

    fuzzing = check.Fuzzing(fuzz_examples) if fuzz_examples else None
    sanitizing = check.Sanitizing(sanitize_examples, tools) if sanitize_examples else None
    numbers = _all_numbers(devices)
    for checked in check.run(implementations, problems, numbers, fuzzing, sanitizing):
        yield checked.outcome, checked.receipt


def _require_tools_of_ranks(tools: tuple[str, ...]) -> None:
    """Raise ``Unsupported`` for a tool that cannot judge an entry of several ranks."""
    from kernelcat.ranks.sanitize import LEFT_OUT

    for tool in tools:
        if tool in LEFT_OUT:
            reason = LEFT_OUT[tool]
            raise Unsupported(f"--tool {tool} is not for an entry of several ranks: {reason}")


def _all_numbers(devices: Devices) -> tuple[int, ...]:
    """The numbers of the GPUs in ``--device``; all by default."""
    from kernelcat.runtime import driver
    from kernelcat.runtime.devices import numbers

    return numbers(devices or "all", driver.count())


def _numbers(devices: Devices) -> tuple[int, ...]:
    """The numbers of the GPUs in ``--device``, which must be of one SKU; GPU 0 by default."""
    from kernelcat.runtime import driver, gpu
    from kernelcat.runtime.devices import numbers, shared_sku

    if not devices:
        return (0,)
    selected = numbers(devices, driver.count())
    shared_sku({number: gpu.detect(number) for number in selected})
    return selected


def _show(outcome: Any) -> None:
    word = "passed" if outcome.passed else "FAILED"
    notes = [f"{len(outcome.problems)} problems", f"{outcome.fuzz_examples} random examples"]
    notes += [f"{len(outcome.skipped)} not served"] if outcome.skipped else []
    notes += [f"{tool} {n}" for tool, n in outcome.sanitizer.items()]
    notes += [f"{outcome.ordered} hazards ruled out by a barrier"] if outcome.ordered else []
    echo(f"{word}  {outcome.implementation}: {', '.join(notes)}")
    left_out = [f"left out: {reason}" for reason in outcome.left_out.values()]
    for line in (*outcome.failures, *outcome.findings, *left_out):
        echo(f"        {line}")


@click.command()
@click.argument("entry")
@click.option(
    "--examples",
    type=AT_LEAST_ONE,
    default=100,
    show_default=True,
    help="Number of random problems for each implementation.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed; one seed always draws the same problems."
)
@click.option(
    "--limit",
    type=AT_LEAST_ONE,
    help="Largest size; by default the largest of each axis, or 70 in Triton's interpreter.",
)
@click.option(
    "--kernels",
    type=AT_LEAST_ONE,
    default=16,
    show_default=True,
    help="Number of combinations of configuration and choices that are compiled.",
)
@click.option(
    "--jobs",
    type=AT_LEAST_ONE,
    help="Processes that compile ahead for a GPU; by default one for each CPU, at most 8.",
)
@click.option("--mirrored", is_flag=True, help="Keep arrays on the host, for compute-sanitizer.")
@devices
@language
@variant
@as_json
def fuzz(
    entry: str,
    examples: int,
    seed: int,
    limit: int | None,
    kernels: int,
    jobs: int | None,
    mirrored: bool,
    devices: Devices,
    language: str | None,
    variant: str | None,
    as_json: bool,
) -> None:
    """Check implementations of ENTRY on random problems.

    A problem that fails is shrunk to a small one. An entry of several ranks has a rank on each GPU
    of --device, all by default; of two ranks at least, which share a GPU where there is one.

    \b
    Example:
      kernelcat fuzz gemm --examples 500
    """
    from kernelcat.runtime.device import Interpreter
    from kernelcat.verify.certify import INTERPRETED_SIZE
    from kernelcat.verify.fuzz import fuzz

    if catalog.entry(entry).ranks:
        return _fuzz_together(
            entry, language, variant, devices, as_json, examples=examples, random_seed=seed,
            limit=limit, kernels=kernels, mirrored=mirrored,
        )  # fmt: skip
    if devices:
        raise InvalidArgument(f"--device is for entries of several ranks, and {entry} has one")
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
            jobs=jobs,
        )
        for i in runnable(choose((entry,), language, variant), device)
    ]
    if as_json:
        emit(results)
    else:
        for result in results:
            echo(f"{result.implementation}: {result.examples} passed")
            if result.failure:
                echo(f"  FAILED  {result.failure}")
    if any(result.failure for result in results):
        sys.exit(1)


def _fuzz_together(
    entry: str, language: str | None, variant: str | None, devices: Devices, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check implementations of an entry of several ranks on random problems."""
    from kernelcat.ranks import check

    chosen, fuzzing = choose((entry,), language, variant), check.Fuzzing(**options)
    outcomes = []
    for checked in check.run_fuzzing(chosen, _all_numbers(devices), fuzzing):
        outcomes.append(checked.outcome)
        if not as_json:
            _show(checked.outcome)
    if as_json:
        emit(outcomes)
    if any(outcome.failures for outcome in outcomes):
        sys.exit(1)
