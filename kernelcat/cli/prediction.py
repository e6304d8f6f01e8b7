"""The verb predict: what cost models are worth."""

from __future__ import annotations

from dataclasses import asdict

import click

from kernelcat.cli.options import as_json
from kernelcat.cli.output import emit, show
from kernelcat.errors import InvalidArgument


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option(
    "--audit", "audits", is_flag=True, help="Compare the cost models with the races of the GPU."
)
@click.option("--gpu", default="h200", show_default=True, help="SKU with measured rows.")
@click.option(
    "--state",
    default="burst",
    show_default=True,
    type=click.Choice(("burst", "sustained", "screen")),
    help="State of the rows; screen has all configurations that a tune tried (needs --db).",
)
@click.option(
    "--db", "url", help="Path or SQLAlchemy URL of a database whose rows are judged instead."
)
@as_json
def predict(
    entries: tuple[str, ...], audits: bool, gpu: str, state: str, url: str | None, as_json: bool
) -> None:
    """Judge the cost models that rank configurations where nothing can be measured.

    For each entry: rank correlation of predicted and measured times (Spearman), and what the
    predicted best, the best of the first 4 and of the first 16 lose against the fastest. With
    entries, a table of the races of each follows. Nothing runs.

    \b
    Example:
      kernelcat predict --audit
      kernelcat predict --audit flashmla paged_attn --gpu h200
      kernelcat predict --audit gemm --state screen --db tuning.sqlite3
    """
    from kernelcat import catalog
    from kernelcat.report.predictions import audit, races_sheet, sheet
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import Store, shipped

    if not audits:
        raise InvalidArgument("give --audit; kernelcat tune ENTRY --gpu SKU predicts for a GPU")
    sku = gpus.find(gpu).sku
    if url is None:
        rows = shipped()
    else:
        with Store.open(url, create=False) as store:
            rows = store.rows(gpu=sku, kind="measured")
    found = [audit(catalog.entry(name), sku, rows, state) for name in entries or catalog.names()]
    if as_json:
        return emit([asdict(each) | {"spearman": each.spearman} for each in found])
    show(sheet(sku, found, state).console())
    for each in found if entries else ():
        show(races_sheet(each).console())
