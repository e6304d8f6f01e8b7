"""The verb predict: what cost models are worth."""

from __future__ import annotations

from dataclasses import asdict

import click

from kernelcat.cli.options import as_json
from kernelcat.cli.output import echo, emit, show
from kernelcat.errors import InvalidArgument


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option(
    "--audit", "is_audit", is_flag=True, help="Compare the cost models with the races of the GPU."
)
@click.option("--gpu", default="h200", show_default=True, help="SKU with measured rows.")
@click.option(
    "--state",
    default="burst",
    show_default=True,
    type=click.Choice(("burst", "sustained", "screen")),
    help="State of the rows; screen has all configurations that a tune tried. Without --db these "
    "are the whole legal spaces of the audits of tunes that come with the package.",
)
@click.option(
    "--db", "url", help="Path or SQLAlchemy URL of a database whose rows are judged instead."
)
@as_json
def predict(
    entries: tuple[str, ...], is_audit: bool, gpu: str, state: str, url: str | None, as_json: bool
) -> None:
    """Judge the cost models that rank configurations where nothing can be measured.

    For each entry: rank correlation of predicted and measured times (Spearman), and what the
    predicted best, the best of the first 4 and of the first 16 lose against the fastest. With
    entries, a table of the races of each follows; for gemm also one for nvMatmulHeuristics, where
    that is installed. Nothing runs.

    \b
    Example:
      kernelcat predict --audit
      kernelcat predict --audit flashmla paged_attn --gpu h200
      kernelcat predict --audit gemm --state screen --db tuning.sqlite3
    """
    from kernelcat import catalog
    from kernelcat.report import matmul_heuristics
    from kernelcat.report.predictions import (
        audit,
        models_sheet,
        races_of,
        races_sheet,
        sheet,
        whole_spaces,
    )
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import Store, audits, shipped
    from kernelcat.store.races import SCREEN

    if not is_audit:
        raise InvalidArgument("give --audit; kernelcat tune ENTRY --gpu SKU predicts for a GPU")
    sku = gpus.find(gpu).sku
    chosen = [catalog.entry(name) for name in entries or catalog.names()]
    if url is None and state == SCREEN:
        measured = [whole_spaces(each, sku, audits.shipped(each.name)) for each in chosen]
    elif url is None:
        measured = [races_of(each, sku, shipped(), state) for each in chosen]
    else:
        with Store.open(url, create=False) as store:
            rows = store.rows(gpu=sku, kind="measured")
        measured = [races_of(each, sku, rows, state) for each in chosen]
    found = [audit(entry, sku, times) for entry, times in zip(chosen, measured, strict=True)]
    if as_json:
        return emit([asdict(each) | {"spearman": each.spearman} for each in found])
    show(sheet(sku, found, state).console())
    for each in found if entries else ():
        show(races_sheet(each).console())
    for entry, times in zip(chosen, measured, strict=True) if entries else ():
        if matmul_heuristics.can_judge(entry.name, sku):
            some, peer = matmul_heuristics.modelled(times), matmul_heuristics.Model(sku).estimate
            judged = {"cost models": audit(entry, sku, some)}
            judged[matmul_heuristics.MODULE] = audit(entry, sku, some, peer)
            show(models_sheet(judged).console())


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All entries.")
@click.option("--gpu", default="h200", show_default=True, help="SKU with measured rows.")
@click.option("--dry-run", is_flag=True, help="Write nothing.")
@as_json
def calibrate(
    entries: tuple[str, ...], every: bool, gpu: str, dry_run: bool, as_json: bool
) -> None:
    """Fit the time models of ENTRY to the measured rows that come with the package.

    Writes coefficients and portfolios to tuning_db/models, which calls read to serve problems that
    nobody measured. The table has what each rule loses on problems that were left out of the fit.
    Nothing runs.

    \b
    Example:
      kernelcat calibrate paged_attn --dry-run
      kernelcat calibrate --all --gpu h200
    """
    from kernelcat import catalog
    from kernelcat.report.calibration_sheet import sheet
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import calibration
    from kernelcat.tune.calibrate import calibrate as calibrated

    if bool(entries) == every:
        raise InvalidArgument("give entries, or --all")
    sku = gpus.find(gpu).sku
    names = catalog.names() if every else entries
    found = [calibrated(catalog.entry(name), sku) for name in names]
    models = {each.entry: each.model for each in found if each.model is not None}
    known = calibration.models(sku)
    changed = {each.entry: each.model for each in found if each.model or each.entry in known}
    if changed and not dry_run:
        file = calibration.save(sku, changed)
    if as_json:
        return emit({name: model.to_json() for name, model in models.items()})
    show(sheet(sku, models).console())
    for each in found:
        if each.why_not:
            echo(f"{each.entry}: no model, {each.why_not}")
    if changed and not dry_run:
        echo(f"written to {file}")
