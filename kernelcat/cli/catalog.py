"""Verbs that look at the catalog: list, show, inspect, doctor."""

from __future__ import annotations

import click

from kernelcat import catalog
from kernelcat.cli.options import as_json, choose, language, variant
from kernelcat.cli.output import emit
from kernelcat.errors import Unsupported


@click.command("list")
@as_json
def list_(as_json: bool) -> None:
    """List the entries and the languages each has.

    \b
    Example:
      kernelcat list
    """
    rows = [
        {"entry": n, "languages": catalog.languages(n), "summary": catalog.entry(n).summary}
        for n in catalog.names()
    ]
    if as_json:
        return emit(rows)
    width = max(len(r["entry"]) for r in rows)
    for row in rows:
        languages = ",".join(row["languages"])
        click.echo(f"{row['entry']:<{width}}  {languages:<17}  {row['summary']}")


@click.command()
@click.argument("entry")
@as_json
def show(entry: str, as_json: bool) -> None:
    """Show an entry: axes, tensors, problems, implementations and their receipts.

    \b
    Example:
      kernelcat show gemm
    """
    from kernelcat.report import show

    card = show.card(entry)
    if as_json:
        return emit(card)
    click.echo(show.text(card))


@click.command()
@click.argument("entry")
@language
@variant
@click.option("--problem", "name", help="Problem to build for; the first one by default.")
@click.option("--gpu", "sku", help="SKU to build for; this machine's GPU by default, else h200.")
@click.option("--sass", is_flag=True, help="Print the machine code.")
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
    """Compile and read the machine code: registers, spills, shared memory, promised instructions.

    \b
    Example:
      kernelcat inspect gemm --language cuda --variant wgmma
    """
    from kernelcat.report import show
    from kernelcat.runtime import driver, gpu

    target = gpu.find(sku) if sku else gpu.detect() if driver.count() else gpu.find("h200")
    chosen = [i for i in choose(entry, language, variant) if i.serves(target.arch)]
    if not chosen:
        raise Unsupported(f"nothing of {entry} serves {target.arch}")
    problem = catalog.entry(entry).named(name) if name else None
    reports = [show.machine_code(i, target, problem, sass) for i in chosen]
    if as_json:
        return emit(reports)
    for report in reports:
        click.echo(show.machine_text(report))


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """Tell what this machine has, what is missing and which entries run here.

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
        click.echo(f"{'ok' if finding.found else '--'}  {finding.what}: {finding.detail}{remedy}")
