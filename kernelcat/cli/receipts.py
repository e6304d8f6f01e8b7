"""Verbs about receipts: which ones hold, and carrying them over a change of the sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kernelcat import catalog
from kernelcat.cli.group import Group
from kernelcat.cli.options import as_json
from kernelcat.cli.output import echo, emit

if TYPE_CHECKING:
    from kernelcat.verify.carry import Comparison
    from kernelcat.verify.code_record import Record

jobs = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Implementations built at a time; by default one for each CPU.",
)
entries = click.argument("entries", metavar="[ENTRY]...", nargs=-1)


@click.group(cls=Group)
def receipts() -> None:
    """Show, carry over, verify and record receipts.

    A receipt proves which checks an implementation passed on a GPU, and with which machine code.

    \b
    Example:
      kernelcat receipts list gemm
    """


@receipts.command("list")
@entries
@as_json
def list_(entries: tuple[str, ...], as_json: bool) -> None:
    """Show for each implementation whether its receipt holds for today's sources.

    \b
    Example:
      kernelcat receipts list
    """
    from kernelcat.verify import receipts

    names = [catalog.entry(name).name for name in entries] or catalog.names()
    states = {
        implementation.name: receipts.state(implementation)
        for name in names
        for implementation in catalog.implementations(name)
    }
    if as_json:
        return emit(states)
    for name, state in states.items():
        echo(f"{name}: {state}")


@receipts.command()
@entries
@jobs
@as_json
def carry(entries: tuple[str, ...], jobs: int | None, as_json: bool) -> None:
    """Build what changed, and carry over the receipts of kernels whose machine code is the same.

    This needs no GPU. It builds with the compilers that the receipts name; if other versions are
    installed here, it first installs those compilers into a separate environment.

    \b
    Example:
      kernelcat receipts carry gemm
    """
    from kernelcat.verify.carry import Comparison, uncarried

    comparisons = _compare(uncarried(_records(entries)), jobs, as_json, Comparison.carried)
    _end(comparisons, as_json, "every receipt holds: nothing changed")


@receipts.command()
@entries
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Build every record, not only what was carried since the last full check.",
)
@jobs
@as_json
def verify(entries: tuple[str, ...], every: bool, jobs: int | None, as_json: bool) -> None:
    """Build what was carried since the last full check again, and compare the machine code.

    \b
    Example:
      kernelcat receipts verify --all
    """
    from kernelcat.verify.carry import Comparison, uncarried, unchecked

    known = _records(entries)
    changed = {record.key for record in uncarried(known)}
    chosen = [r for r in known if r.key not in changed] if every else unchecked(known)
    comparisons = _compare(chosen, jobs, as_json, Comparison.checked)
    _end(comparisons, as_json, "nothing was carried since the last full check")


@receipts.command()
@entries
@jobs
@as_json
def record(entries: tuple[str, ...], jobs: int | None, as_json: bool) -> None:
    """Record the machine code of everything that was checked or measured with today's sources.

    Run it after receipts or results were added to tuning_db, before a source changes.

    \b
    Example:
      kernelcat receipts record
    """
    from kernelcat.catalog.digest import digest_of
    from kernelcat.store import shipped
    from kernelcat.verify import code_record, profiles, receipts
    from kernelcat.verify.carry import build
    from kernelcat.verify.recorder import missing

    names = {catalog.entry(name).name for name in entries or catalog.names()}
    known = receipts.read(receipts.shipped_folder())
    requests = missing(
        [receipt for receipt in known if receipt.implementation.partition("/")[0] in names],
        [*(r for r in shipped() if not r.is_peer), *profiles.read(profiles.shipped_folder())],
        code_record.read(code_record.shipped_folder()),
    )
    added: dict[str, int] = {}
    failed: list[str] = []
    for before, codes in build(requests, jobs):
        added_codes = [code for case, code in codes.items() if before.code(case) is None]
        errors = [code[1:] for code in added_codes if code.startswith("!")]
        if errors:
            failed.append(f"{before.implementation}: {errors[0]}")
            continue
        today = digest_of(*before.implementation.split("/"))
        code_record.write(code_record.shipped_folder(), [before.with_cases(codes, today)])
        added[before.implementation] = len(codes)
    if as_json:
        emit({"added": added, "failed": failed})
    else:
        for name, count in added.items():
            echo(f"{name}: {count} cases added")
        for line in failed or ([] if added else ["nothing was missing"]):
            echo(line)
    if failed:
        sys.exit(1)


@receipts.command()
@as_json
def digests(as_json: bool) -> None:
    """Write the table of digests, which saves digesting unchanged files.

    \b
    Example:
      kernelcat receipts digests
    """
    from kernelcat.catalog import digest

    chosen = [i for name in catalog.names() for i in catalog.implementations(name)]
    text = json.dumps(digest.table(chosen), indent=0, sort_keys=True)
    changed = not digest.table_path().exists() or digest.table_path().read_text() != f"{text}\n"
    digest.table_path().write_text(f"{text}\n")
    if as_json:
        return emit({"file": str(digest.table_path()), "changed": changed})
    echo(f"{digest.table_path().name}: {'written' if changed else 'unchanged'}")


def _records(entries: Sequence[str]) -> list[Record]:
    """The shipped records of ``entries``, or of all entries if there are none."""
    from kernelcat.verify import code_record

    names = {catalog.entry(name).name for name in entries}
    known = code_record.read(code_record.shipped_folder())
    return [r for r in known if not names or r.implementation.partition("/")[0] in names]


def _compare(
    records: Sequence[Record],
    jobs: int | None,
    as_json: bool,
    write: Callable[[Comparison], Record],
) -> Iterator[Comparison]:
    """Yield each comparison when it is made; if nothing differs, write its record at once.

    ``write`` returns the record to write.
    """
    from kernelcat.verify import code_record
    from kernelcat.verify.carry import compare

    for comparison in compare(records, jobs):
        if comparison.same:
            code_record.write(code_record.shipped_folder(), [write(comparison)])
        if not as_json:
            echo(str(comparison))
        yield comparison


def _end(comparisons: Iterator[Comparison], as_json: bool, nothing: str) -> None:
    """Print the comparisons as JSON, or ``nothing`` if there are none; exit 1 if any differs."""
    finished = list(comparisons)
    rows: list[dict[str, Any]] = [
        {"implementation": one.record.implementation, "same": one.same, "text": str(one)}
        for one in finished
    ]
    if as_json:
        emit(rows)
    elif not finished:
        echo(nothing)
    if not all(one.same for one in finished):
        sys.exit(1)
