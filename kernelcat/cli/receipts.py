"""Verbs about proof that is kept: which receipts hold, and what carries them over a change."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from kernelcat import catalog
from kernelcat.cli.options import as_json
from kernelcat.cli.output import emit

if TYPE_CHECKING:
    from kernelcat.verify.carry import Comparison
    from kernelcat.verify.code_record import Record

jobs = click.option(
    "--jobs", type=int, help="Implementations built at a time; all cores by default."
)
entries = click.argument("entries", metavar="[ENTRY]...", nargs=-1)


@click.group()
def receipts() -> None:
    """Look after receipts: what ran on a GPU, and which machine code it was.

    \b
    Example:
      kernelcat receipts list gemm
    """


@receipts.command("list")
@entries
@as_json
def list_(entries: tuple[str, ...], as_json: bool) -> None:
    """Tell of every implementation whether its receipt holds for the sources as they are.

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
        click.echo(f"{name}: {state}")


@receipts.command()
@entries
@jobs
@as_json
def carry(entries: tuple[str, ...], jobs: int | None, as_json: bool) -> None:
    """Build what changed, and keep the receipts of kernels whose machine code did not.

    Needs no GPU. Builds by the compilers that the receipts name; where others are installed here,
    those are installed into an environment of their own.

    \b
    Example:
      kernelcat receipts carry gemm
    """
    from kernelcat.verify.carry import Comparison, uncarried

    found = _compare(uncarried(_records(entries)), jobs, as_json, Comparison.carried)
    _end(found, as_json, "every receipt holds: nothing changed")


@receipts.command()
@entries
@click.option("--all", "every", is_flag=True, help="Not only what was carried since the last time.")
@jobs
@as_json
def verify(entries: tuple[str, ...], every: bool, jobs: int | None, as_json: bool) -> None:
    """Build again what was carried since the last full check, and compare the machine code.

    \b
    Example:
      kernelcat receipts verify --all
    """
    from kernelcat.verify.carry import Comparison, uncarried, unchecked

    known = _records(entries)
    changed = {record.key for record in uncarried(known)}
    chosen = [r for r in known if r.key not in changed] if every else unchecked(known)
    found = _compare(chosen, jobs, as_json, Comparison.checked)
    _end(found, as_json, "nothing was carried since the last full check")


@receipts.command()
@entries
@jobs
@as_json
def record(entries: tuple[str, ...], jobs: int | None, as_json: bool) -> None:
    """Record the machine code of what was checked and measured as the sources are now.

    To be called when receipts or results were added to tuning_db, before a source changes.

    \b
    Example:
      kernelcat receipts record
    """
    from kernelcat.store import shipped
    from kernelcat.verify import code_record, profiles, receipts
    from kernelcat.verify.carry import build
    from kernelcat.verify.recorder import missing

    names = {catalog.entry(name).name for name in entries or catalog.names()}
    known = receipts.read(receipts.shipped_folder())
    wanted = missing(
        [receipt for receipt in known if receipt.implementation.partition("/")[0] in names],
        [*(r for r in shipped() if not r.is_peer), *profiles.read(profiles.shipped_folder())],
        code_record.read(code_record.shipped_folder()),
    )
    added: dict[str, int] = {}
    failed: list[str] = []
    for before, codes in build(wanted, jobs):
        broken = [code for code in codes.values() if code.startswith("!")]
        if broken:
            failed.append(f"{before.implementation}: {broken[0][1:]}")
            continue
        code_record.write(code_record.shipped_folder(), [before.with_cases(codes)])
        added[before.implementation] = len(codes)
    if as_json:
        emit({"added": added, "failed": failed})
    else:
        for name, count in added.items():
            click.echo(f"{name}: {count} cases added")
        for line in failed or ([] if added else ["nothing was missing"]):
            click.echo(line)
    if failed:
        sys.exit(1)


@receipts.command()
@as_json
def digests(as_json: bool) -> None:
    """Write the table of digests anew, by which unchanged files need not be digested.

    Entries that are work in progress are left out.

    \b
    Example:
      kernelcat receipts digests
    """
    from kernelcat.catalog import digest

    found = [i for name in catalog.complete() for i in catalog.implementations(name)]
    text = json.dumps(digest.table(found), indent=0, sort_keys=True)
    changed = not digest.table_path().exists() or digest.table_path().read_text() != f"{text}\n"
    digest.table_path().write_text(f"{text}\n")
    if as_json:
        return emit({"file": str(digest.table_path()), "changed": changed})
    click.echo(f"{digest.table_path().name}: {'written' if changed else 'as it was'}")


def _records(entries: Sequence[str]) -> list[Record]:
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
    """The comparisons as they are made; the record of one that is the same is written at once."""
    from kernelcat.verify import code_record
    from kernelcat.verify.carry import compare

    for found in compare(records, jobs):
        if found.same:
            code_record.write(code_record.shipped_folder(), [write(found)])
        if not as_json:
            click.echo(str(found))
        yield found


def _end(found: Iterator[Comparison], as_json: bool, nothing: str) -> None:
    """Print what was found; the command fails when anything differs."""
    done = list(found)
    told: list[dict[str, Any]] = [
        {"implementation": one.record.implementation, "same": one.same, "text": str(one)}
        for one in done
    ]
    if as_json:
        emit(told)
    elif not done:
        click.echo(nothing)
    if not all(one.same for one in done):
        sys.exit(1)
