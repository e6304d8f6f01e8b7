"""Verbs about kernels that are chosen and compiled before a program runs: build, lock."""

from __future__ import annotations

from pathlib import Path

import click

from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.cli.options import as_json, note_missing_languages
from kernelcat.cli.output import echo, emit
from kernelcat.errors import InvalidArgument

FILE = click.Path(path_type=Path, dir_okay=False)
workload_file = click.option(
    "--workload",
    "path",
    type=FILE,
    help="The problems of this file, which kernelcat.record or KERNELCAT_RECORD wrote.",
)


@click.command()
@click.argument("entry", required=False)
@click.option("--gpu", "sku", required=True, help="SKU to compile for; it need not be here.")
@workload_file
@click.option("--lock", "lock_path", type=FILE, help="The problems and kernels of this lock.")
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    help="Choose among kernels of this language only. Those in cuda run without any compiler "
    "package.",
)
@click.option(
    "-o", "--output", "folder", required=True, type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write, which must be new or empty.",
)  # fmt: skip
@as_json
def build(
    entry: str | None,
    sku: str,
    path: Path | None,
    lock_path: Path | None,
    language: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Compile what calls would choose into a folder, for machines without a compiler.

    Built are the problems of a workload or of a lock, or the named problems of ENTRY (without
    ENTRY, of all entries). No GPU is needed. A program calls kernelcat.prepare(FOLDER) before its
    first call.

    \b
    Example:
      kernelcat build gemm --gpu h200 --workload workload.jsonl -o kernels-h200

    The folder has a digest for each file (SHA256SUMS), and prepare refuses the whole folder if a
    byte differs. The digest that is printed names the folder: kernelcat.prepare(FOLDER, sha256=...)
    also refuses a folder that somebody replaced. Progress goes to standard error.
    """
    from kernelcat import catalog
    from kernelcat.call import ahead
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import workload

    gpu, refused = gpus.find(sku), dict[str, str]()
    name = None if entry is None else catalog.entry(entry).name
    if language is None:
        note_missing_languages(*([name] if name else catalog.names()))
    if lock_path is not None:
        if path is not None or language is not None:
            raise click.UsageError("--lock goes without --workload and --language")
        asked = ahead.locked_problems(lock_path, gpu, name)
        if not asked:
            raise InvalidArgument(f"{lock_path} has no problem to build for {gpu.sku}")
    elif path is None:
        asked = ahead.named(name, language)
    else:
        asked, refused = ahead.recorded(workload.read(path), name, language)
        if not asked:
            raise InvalidArgument(f"{path} names no problem to build")

    def progress(problem: str, outcome: str) -> None:
        echo(f"{problem}: {outcome}", err=True)

    report = ahead.build_bundle(asked, gpu, folder, refused, progress)
    if as_json:
        return emit(report)
    for problem, reason in report.refused.items():
        echo(f"not built: {problem}: {reason}")
    echo(f"{folder}: {report.kernels} kernels for {len(report.served)} problems on {gpu.sku}, "
         f"{report.bytes / 1e6:.1f} MB")  # fmt: skip
    echo(f"kernelcat.prepare({str(folder)!r}, sha256={report.sha256!r})")


@click.command()
@workload_file
@click.option("--gpu", "sku", help="Lock all problems for this SKU; by default each for the SKUs "
              "of the workload.")  # fmt: skip
@click.option("-o", "--output", "file", required=True, type=FILE, help="The lock to write.")
@as_json
def lock(path: Path | None, sku: str | None, file: Path, as_json: bool) -> None:
    """Write down which kernels serve the problems of a workload, with digests of machine code.

    The kernels are those that calls would choose today. No GPU is needed. A program that calls
    kernelcat.use_lock(FILE) is served by exactly these kernels, whatever the database says later,
    and a kernel with other machine code is refused. The exit status is 1 if a problem could not be
    locked.

    \b
    Example:
      kernelcat lock --workload workload.jsonl --gpu h200 -o kernelcat.lock

    Calls that pin a configuration are left out: a lock does not change them.
    """
    from kernelcat import catalog
    from kernelcat.call import ahead
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import workload

    if path is None:
        raise click.UsageError("name a --workload: a file that KERNELCAT_RECORD=FILE wrote")

    def progress(problem: str, outcome: str) -> None:
        echo(f"{problem}: {outcome}", err=True)

    note_missing_languages(*catalog.names())
    only = None if sku is None else gpus.find(sku)
    report = ahead.write_lock(workload.read(path), file, only, progress)
    if as_json:
        items = [item.to_json() for item in report.locked]
        emit({"file": report.file, "locked": items, "refused": report.refused})
    else:
        echo(f"{file}: {len(report.locked)} problems")
    if report.refused:
        name, reason = next(iter(report.refused.items()))
        raise InvalidArgument(f"{len(report.refused)} problems are not locked: {name}: {reason}")
