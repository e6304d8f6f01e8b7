"""Verbs about the catalog: list, show, inspect, doctor, new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.cli.options import as_json, choose, language, note_missing_compilers, variant
from kernelcat.cli.output import echo, emit
from kernelcat.errors import Unsupported


@click.command("list")
@as_json
def list_(as_json: bool) -> None:
    """List the entries, each with its languages and a summary.

    \b
    Example:
      kernelcat list
    """
    rows: list[dict[str, Any]] = [
        {
            "entry": entry.name,
            "languages": catalog.languages(entry.name),
            "summary": entry.summary,
            "work_in_progress": entry.work_in_progress,
        }
        for entry in map(catalog.entry, catalog.names())
    ]
    if as_json:
        return emit(rows)
    note_missing_compilers()
    width = max(len(r["entry"]) for r in rows)
    for row in rows:
        languages = ",".join(row["languages"])
        mark = "(work in progress) " if row["work_in_progress"] else ""
        echo(f"{row['entry']:<{width}}  {languages:<17}  {mark}{row['summary']}")


@click.command()
@click.argument("entry")
@as_json
def show(entry: str, as_json: bool) -> None:
    """Show the axes, tensors, problems and implementations of ENTRY.

    \b
    Example:
      kernelcat show gemm
    """
    from kernelcat.report import show

    card = show.card(entry)
    if as_json:
        return emit(card)
    echo(show.text(card))


@click.command()
@click.argument("entry")
@click.option(
    "--problem", "name", required=True, help="Name of a problem, or axis values: M=256,N=512,K=64."
)
@click.option("--gpu", "sku", help="SKU; by default this machine's GPU.")
@as_json
def explain(entry: str, name: str, sku: str | None, as_json: bool) -> None:
    """Show which implementation serves a problem of ENTRY, and why.

    \b
    Example:
      kernelcat explain gemm --problem M=256,N=57344,K=8192 --gpu h200
    """
    import kernelcat

    problem = catalog.entry(entry).named(name)
    explanation = kernelcat.get(entry).explain(gpu=sku, **problem.values)
    if as_json:
        return emit(
            {
                "entry": entry,
                "problem": problem.values,
                "gpu": explanation.gpu.sku,
                "implementation": explanation.implementation.name,
                "config": dict(explanation.config),
                "why": explanation.why,
                "stale": explanation.stale,
                "text": str(explanation),
            }
        )
    echo(str(explanation))


@click.command()
@click.argument("entry")
@language
@variant
@click.option(
    "--problem",
    "name",
    help="Problem to compile for, a name or axis values; by default the first one that the "
    "implementation serves.",
)
@click.option(
    "--gpu", "sku", help="SKU to compile for; by default this machine's GPU, or h200 without a GPU."
)
@click.option("--sass", is_flag=True, help="Also print the disassembled machine code (SASS).")
@as_json
def inspect(
    entry: str,
    language: str | None,
    variant: str | None,
    name: str | None,
    sku: str | None,
    sass: bool,
    as_json: bool,
) -> None:
    """Compile implementations of ENTRY and examine the machine code.

    The report has registers of a thread, bytes spilled, bytes of shared memory, and whether the
    instruction of each technique is in the code.

    \b
    Example:
      kernelcat inspect gemm --language cuda --variant wgmma
    """
    from kernelcat.report import show
    from kernelcat.runtime import driver, gpu

    target = gpu.find(sku) if sku else gpu.detect() if driver.count() else gpu.find("h200")
    chosen = [i for i in choose((entry,), language, variant) if i.serves(target.arch)]
    if not chosen:
        raise Unsupported(f"no implementation of {entry} serves {target.arch}")
    problem = catalog.entry(entry).named(name) if name else None
    reports = [show.machine_code(i, target, problem, sass) for i in chosen]
    if as_json:
        return emit(reports)
    for report in reports:
        echo(show.machine_text(report))


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """Show what this machine has and what is missing.

    Missing software is listed with the line that installs it, entries with what runs here.

    \b
    Example:
      kernelcat doctor
    """
    from kernelcat.report.doctor import examine

    findings = examine()
    if as_json:
        return emit(findings)
    for finding in findings:
        remedy = f"  ->  {finding.remedy}" if finding.remedy else ""
        echo(f"{'ok' if finding.found else '--'}  {finding.what}: {finding.detail}{remedy}")


@click.command()
@click.argument("name")
@click.option(
    "--language", "languages", type=click.Choice(LANGUAGES), multiple=True, default=("triton",),
    show_default=True, help="Language of the first kernel; may be repeated.",
)  # fmt: skip
@click.option("--summary", default="The sum of two vectors.", help="What the entry computes.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False),
              help="Write into this folder of your own package instead of a checkout of the "
              "repository; KERNELCAT_ENTRIES then names it.")  # fmt: skip
@as_json
def new(
    name: str, languages: tuple[str, ...], summary: str, folder: Path | None, as_json: bool
) -> None:
    """Write the files of a new entry.

    They are a specification and a working kernel for each language. The entry is marked as work in
    progress; remove the mark when the entry is complete.

    \b
    Example:
      kernelcat new rms_norm --language triton --language cuda
    """
    from kernelcat.catalog import skeleton

    paths = skeleton.write(name, languages, summary, folder)
    if as_json:
        return emit({"entry": name, "files": [str(path) for path in paths]})
    for path in paths:
        echo(str(folder / path if folder else path))
    own = f"KERNELCAT_ENTRIES={folder} " if folder else ""
    echo(f"next: {own}kernelcat check {name}, then docs/add-an-entry.md")
