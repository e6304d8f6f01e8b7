"""Verbs about kernels that are chosen and compiled before a program runs: build."""

from __future__ import annotations

from pathlib import Path

import click

from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.cli.options import as_json
from kernelcat.cli.output import echo, emit
from kernelcat.errors import InvalidArgument

workload_file = click.option(
    "--workload",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The problems of this file, which kernelcat.record or KERNELCAT_RECORD wrote.",
)


@click.command()
@click.argument("entry", required=False)
@click.option("--gpu", "sku", required=True, help="SKU to compile for; it need not be here.")
@workload_file
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
    language: str | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Compile what calls would choose into a folder, for machines without a compiler.

    Built are the problems of a workload, or the named problems of ENTRY (without ENTRY, of all
    entries). No GPU is needed. A program calls kernelcat.prepare(FOLDER) before its first call.

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
    if path is None:
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
