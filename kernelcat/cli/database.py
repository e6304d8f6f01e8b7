"""Verbs about results: leaderboard, db."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kernelcat.cli.group import Group
from kernelcat.cli.options import as_json, database
from kernelcat.cli.output import echo, emit, note_missing_database, show, write_csv
from kernelcat.cli.upkeep import peers, prune, stats
from kernelcat.errors import InvalidArgument

FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=Group)
def db() -> None:
    """Locate, query, export, import, merge and prune databases of measurements.

    \b
    Example:
      kernelcat db path
    """


db.add_command(stats)
db.add_command(prune)
db.add_command(peers)


@db.command()
@as_json
@database
def path(url: str | None, as_json: bool) -> None:
    """Print the path or URL of the database.

    \b
    Example:
      kernelcat db path
    """
    from kernelcat.store import locate

    location = locate(url)
    exists = location.path.exists() if location.path else None
    if as_json:
        return emit({"database": str(location), "exists": exists})
    echo(str(location))


@db.command()
@click.argument("file", type=FILE)
@click.option("--gpu", help="Export only results of this SKU.")
@click.option(
    "--all", "everything", is_flag=True, help="Export every row, failures included, as a backup."
)
@click.option("--onto", type=FILE, help="Write this file's results too, unless they are older.")
@click.option("--history", type=FILE, help="Keep the winners of earlier races in this file.")
@as_json
@database
def export(
    file: Path,
    gpu: str | None,
    everything: bool,
    onto: Path | None,
    history: Path | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Write results to FILE as JSON Lines: winners, rivals and peers of the newest races.

    FILE is replaced. With --onto FILE its results stay where there are no newer ones.

    \b
    Example:
      kernelcat db export results.jsonl --gpu h200 --onto results.jsonl
    """
    from kernelcat import store

    if everything and history:
        raise click.UsageError("--all has every race already: leave --history out")
    with store.Store.open(url, create=False) as opened:
        rows = store.export(
            opened, file, gpu=gpu, shipped=not everything, onto=onto, history=history
        )
    if as_json:
        return emit({"file": str(file), "rows": rows})
    echo(f"{file}: {rows} rows")


@db.command("import")
@click.argument("file", type=FILE)
@click.option(
    "--partial", is_flag=True, help="Add the valid lines of a file that has invalid lines."
)
@as_json
@database
def import_(file: Path, partial: bool, url: str | None, as_json: bool) -> None:
    """Add the results in FILE. If a line is invalid, nothing is added.

    \b
    Example:
      kernelcat db import results.jsonl
    """
    from kernelcat import store

    with store.Store.open(url) as opened:
        report = store.import_(opened, file, partial=partial)
    if as_json:
        emit(report)
    else:
        echo(f"{report.added} added, {report.known} known, {len(report.refused)} refused")
    if report.refused:
        line, reason = report.refused[0]
        effect = "the valid lines were added" if partial else "nothing was added"
        raise InvalidArgument(f"{file}:{line}: {reason}; {effect}")


@db.command()
@click.argument("other")
@as_json
@database
def merge(other: str, url: str | None, as_json: bool) -> None:
    """Add the results of OTHER, a database or JSON Lines file, and print where winners differ.

    \b
    Example:
      kernelcat db merge colleague.sqlite3
    """
    from kernelcat import store

    with store.Store.open(url) as opened:
        report = store.merge(opened, other)
    conflicts = [str(conflict) for conflict in report.conflicts]
    if as_json:
        counts = {"added": report.added, "known": report.known, "refused": report.refused}
        return emit(counts | {"conflicts": conflicts})
    echo(f"{report.added} added, {report.known} known, {len(report.refused)} refused")
    for conflict in conflicts:
        echo(conflict)
    for number, reason in report.refused[:1]:
        echo(f"refused, for example row {number}: {reason}")


@db.command("sources")
@as_json
@database
def list_sources(url: str | None, as_json: bool) -> None:
    """List who brought the results: measured here, shipped, or imported from a file or database.

    \b
    Example:
      kernelcat db sources
    """
    from kernelcat.store.sources import opened, sources

    with opened(url) as store:
        found = sources(store)
    if as_json:
        return emit(found)
    for each in found:
        echo(f"{each.name}: {each.rows} rows, {each.first[:10]} to {each.last[:10]}")


@db.command("drop")
@click.argument("source")
@as_json
@database
def drop_source(source: str, url: str | None, as_json: bool) -> None:
    """Delete all results of SOURCE, a name that kernelcat db sources lists.

    \b
    Example:
      kernelcat db drop /home/me/results.jsonl
    """
    from kernelcat.store import Store
    from kernelcat.store.sources import drop

    with Store.open(url, create=False) as store:
        deleted = drop(store, source)
    if as_json:
        return emit({"source": source, "deleted": deleted})
    echo(f"{deleted} rows of {source} deleted")


@db.command("verify")
@as_json
@database
def verify_rows(url: str | None, as_json: bool) -> None:
    """List results that cannot be true, and crashes and timeouts with what they saw.

    A crash or a timeout may have another cause than the kernel. The exit status is 1 if a result
    cannot be true.

    \b
    Example:
      kernelcat db verify
    """
    from kernelcat.store.sources import opened, verify

    with opened(url) as store:
        findings = verify(store)
    doubtful = sum(not finding.is_verdict for finding in findings)
    if as_json:
        emit(findings)
    else:
        for finding in findings:
            echo(f"{finding.source}: {finding.row}: {finding.reason}")
        verdicts = len(findings) - doubtful
        echo(f"{doubtful} results cannot be true; {verdicts} crashes and timeouts")
    if doubtful:
        raise InvalidArgument(
            f"{doubtful} results cannot be true: kernelcat db drop SOURCE deletes those of a source"
        )


@db.command("query")
@click.argument("sql")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with a line of column names.")
@as_json
@database
def run_query(sql: str, as_csv: bool, url: str | None, as_json: bool) -> None:
    """Answer SQL, one SELECT statement, from the database's table kernelcat_measurements.

    The database is opened read-only. Shipped results are not in it; kernelcat db import adds a
    file's. Times are in microseconds.

    \b
    Example:
      kernelcat db query "SELECT entry, count(*) AS rows FROM kernelcat_measurements GROUP BY entry"
    """
    from kernelcat.report.sheet import Sheet
    from kernelcat.store.query import query

    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    answer = query(sql, url)
    if as_json:
        return emit(answer.records())
    if as_csv:
        return write_csv(answer.columns, answer.rows)
    cells = [["" if value is None else str(value) for value in row] for row in answer.rows]
    show(
        Sheet(
            "", answer.columns, cells, [f"{len(cells)} row{'s' * (len(cells) != 1)}"], slice(0, 0)
        ).console()
    )


@db.command("misses")
@click.option(
    "--workload",
    "file",
    type=FILE,
    envvar="KERNELCAT_RECORD",
    show_envvar=True,
    help="File that kernelcat.record or KERNELCAT_RECORD wrote.",
)
@click.option("--gpu", help="Show only calls on this SKU.")
@as_json
@database
def list_misses(file: Path | None, gpu: str | None, url: str | None, as_json: bool) -> None:
    """List problems that programs called and nobody has measured, those that cost most first.

    Each line says what served the problem, and why: nearest (the winner of a near problem), bucket,
    borrowed (from another GPU), predicted or default.

    \b
    Example:
      kernelcat db misses --workload workload.jsonl --gpu h200
    """
    from kernelcat.report.misses import misses
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import workload

    if file is None:
        raise click.UsageError("name a --workload: a file that KERNELCAT_RECORD=FILE wrote")
    found = misses(workload.read(file), gpus.find(gpu).sku if gpu else None, url)
    if as_json:
        return emit([miss.to_json() for miss in found.misses])
    show(found.sheet().console())


@click.command()
@click.argument("entry", required=False)
@click.option("--gpu", help="Show only this SKU.")
@click.option("--regime", type=click.Choice(("graph", "eager")), default="graph",
              show_default=True, help="graph: device time. eager: host time included.")  # fmt: skip
@click.option("--state", type=click.Choice(("sustained", "burst", "ladder")),
              help="Show only races on a hot chip (sustained), on a cool chip (burst), or of every "
              "variant (ladder). By default, each problem's race in the first of these states, "
              "which also decides calls.")  # fmt: skip
@click.option("--problem", default="*", metavar="PATTERN",
              help="Show only problems with this name; * stands for any text.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="PATH",
              help="Write a site of static pages into this folder, or the tables as one page if "
              "the name ends with .html.")  # fmt: skip
@click.option("--serve", is_flag=True, help="Show the site of the live database on this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="Port of --serve; 0 for any free one.")  # fmt: skip
@click.option(
    "--readme",
    type=FILE,
    help="Update the tables in this Markdown file, and docs/ beside it, from tuning_db.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, a line for each problem.")
@click.option("--markdown", is_flag=True, help="Print tables in Markdown.")
@as_json
@database
def leaderboard(
    entry: str | None,
    gpu: str | None,
    regime: str,
    state: str | None,
    problem: str,
    html: Path | None,
    serve: bool,
    port: int,
    readme: Path | None,
    url: str | None,
    as_csv: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    """Show the fastest implementation of each problem.

    The table compares it with the peers of the same race. Results are shipped and local ones,
    times are in microseconds.

    \b
    Example:
      kernelcat leaderboard gemm --gpu h200
      kernelcat leaderboard --csv
    """
    from kernelcat import catalog
    from kernelcat.report.board import board, load
    from kernelcat.report.last_raced import LastRaced
    from kernelcat.report.render import table, to_csv, to_json, to_markdown
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import plausibility

    if as_csv + markdown + as_json > 1:
        raise click.UsageError("give one of --csv, --markdown and --json")
    if serve and (html or readme or as_csv or markdown or as_json):
        raise click.UsageError("--serve goes with --gpu, --db and --port alone")
    if readme:
        from kernelcat.report import documents

        documents.update(readme)
        return emit({"file": str(readme)}) if as_json else None
    name = catalog.entry(entry).name if entry else None
    sku = gpus.find(gpu).sku if gpu else None
    if serve:
        return _serve_site((sku, name, url), port)
    if html and html.suffix != ".html":
        return _write_site(html, (sku, name, url), as_json)
    is_table = not (html or as_csv or markdown or as_json)
    last = LastRaced(problem, state) if is_table else None
    click.get_current_context().with_resource(_without_collector())
    known = load(sku, name, regime, url, choose=last)
    rows = board(known, sku, name, regime, state, problem, doubt=plausibility.doubt)
    if html:
        from kernelcat.report.page import to_html

        html.write_text(to_html(rows), encoding="utf-8")
        return emit({"file": str(html)}) if as_json else echo(str(html))
    if as_json:
        return echo(to_json(rows))
    if as_csv:
        return write_csv(*to_csv(rows))
    if markdown:
        return echo(to_markdown(rows))
    if not rows and problem != "*" and known:
        raise InvalidArgument(
            f"no result is of a problem called {problem!r}; * stands for any text"
        )
    if url is None:
        note_missing_database()
    show(table(rows, last.notes() if last else ()))
    doubtful = sum(plausibility.doubt(row) is not None for row in known)
    if doubtful:
        least = "At least " if last and last.left_out else ""
        echo(f"{least}{doubtful} results cannot be true and are left out: "
             "kernelcat db verify lists them.")  # fmt: skip


@contextmanager
def _without_collector() -> Iterator[None]:
    """No search for cycles of garbage: among 100,000 new objects without one it takes 0.2 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


Selection = tuple[str | None, str | None, str | None]
"""SKU, entry and database of a site: the arguments of :class:`kernelcat.report.site.Results`."""


def _write_site(folder: Path, selection: Selection, is_json: bool) -> None:
    from kernelcat.report.site import Results, write

    results = Results(*selection)
    write(folder, results.pages(results.rows()))
    first = str(folder / "index.html")
    return emit({"file": first}) if is_json else echo(first)


def _serve_site(selection: Selection, port: int) -> None:
    """Serve the site until the program is interrupted."""
    from kernelcat.report.site import Results
    from kernelcat.report.site.serve import Site

    with Site(Results(*selection), port) as site:
        echo(f"{site.url} shows these results until Ctrl-C.")
        try:
            site.serve_forever()
        except KeyboardInterrupt:
            return
