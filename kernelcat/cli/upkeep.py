"""Verbs about the upkeep of a database: db stats, db prune, db peers."""

from __future__ import annotations

import click

from kernelcat.cli.options import as_json, database
from kernelcat.cli.output import echo, emit, show


@click.command()
@as_json
@database
def stats(url: str | None, as_json: bool) -> None:
    """Show how many results the database holds, by entry, GPU and kind, and its size.

    Shipped results are not in it: kernelcat db sources counts them.

    \b
    Example:
      kernelcat db stats
    """
    from kernelcat.report.sheet import Sheet
    from kernelcat.store import locate
    from kernelcat.store.sources import opened
    from kernelcat.store.upkeep import counts, size

    with opened(url) as store:
        found, size_bytes = counts(store), size(store)
    rows = sum(count.rows for count in found)
    if as_json:
        return emit({"database": str(locate(url)), "rows": rows, "bytes": size_bytes,
                     "counts": found})  # fmt: skip
    total = "" if size_bytes is None else f", {size_bytes / 1e6:.1f} MB"
    headers = ("entry", "gpu", "kind", "rows", "passed", "runs", "first", "last")
    lines = [
        [c.entry, c.gpu, c.kind, f"{c.rows:,}", f"{c.passed:,}", f"{c.runs:,}", c.first[:10],
         c.last[:10]] for c in found
    ]  # fmt: skip
    note = f"{locate(url)}: {rows:,} rows{total}"
    show(Sheet("", headers, lines, [note], slice(3, 6)).console())


@click.command()
@click.option("--dry-run", is_flag=True, help="Only count the rows that would be deleted.")
@as_json
@database
def prune(dry_run: bool, url: str | None, as_json: bool) -> None:
    """Delete results of old code that no call, table or tune reads.

    Kept are results of today's code, the newest race of each problem with its peers, and every
    result that was found wrong. A tune of an older version of the code would start anew. Results of
    a language that is not installed here are kept, too.

    \b
    Example:
      kernelcat db prune --dry-run
    """
    from kernelcat.catalog.digest import UNKNOWN, digest_of
    from kernelcat.store import Measurement, Store, upkeep
    from kernelcat.verify.code_record import is_current

    def current(row: Measurement) -> bool:
        return digest_of(row.entry, row.language, row.variant) == UNKNOWN or is_current(row)

    with Store.open(url, create=False) as store:
        report = upkeep.prune(store, current, dry_run)
    if as_json:
        return emit(report)
    verb = "would be deleted" if dry_run else "deleted"
    before, after = report.bytes_before, report.bytes_after
    sizes = "" if before is None or after is None or dry_run else (
        f", {before / 1e6:.1f} MB before and {after / 1e6:.1f} MB now")  # fmt: skip
    echo(f"{report.deleted} rows {verb}, {report.kept} kept{sizes}")


@click.command()
@as_json
@database
def peers(url: str | None, as_json: bool) -> None:
    """List named problems that were measured without a peer, and why no peer computes them.

    Results are shipped and local ones.

    \b
    Example:
      kernelcat db peers
    """
    from kernelcat.report import missing_peers
    from kernelcat.report.board import load

    found = missing_peers.missing(load(url=url))
    if as_json:
        return emit(found)
    show(missing_peers.sheet(found).console())
