"""The verb results of moe: keeps what bench measured."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernelcat.cli.options import as_json
from kernelcat.cli.output import echo, emit
from kernelcat.errors import InvalidArgument


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--gpu", required=True, help="The GPU that was measured: h200, h200x2-nvlink.")
@click.option("--command", required=True, help="The command line that wrote FILE.")
@click.option("--date", "created_at", required=True, help="When: 2026-11-24, or with a time.")
@click.option("--commit", default="", help="Commit of kernelcat's sources.")
@click.option("--version", "versions", multiple=True, metavar="PACKAGE=VERSION",
              help="Of a peer or another package; may be repeated.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False),
              help="Where results are kept; default: tuning_db/engine.")  # fmt: skip
@as_json
def results(
    file: Path,
    gpu: str,
    command: str,
    created_at: str,
    commit: str,
    versions: tuple[str, ...],
    folder: Path | None,
    as_json: bool,
) -> None:
    """Add FILE, which bench --out wrote, to the results of models.

    FILE has loads and decoding, a fetched prefix (--fetch), or what prompts cost requests that
    write (--disaggregate). The server's address and the places of traces are left out. The same
    command's older result is replaced. README's sentence about the engine, docs/results/engine.md
    and the site's page of the engine are made from tuning_db/engine, the first two by make readme.

    \b
    Example:
      kernelcat moe bench gpt-oss-20b --random-weights --out run.json
      kernelcat moe results run.json --gpu h200 --date 2026-11-24 \\
        --command "kernelcat moe bench gpt-oss-20b --random-weights"
    """
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import model_results

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{file} is no JSON: {error}") from error
    if wrong := [each for each in versions if "=" not in each]:
        raise InvalidArgument(f"--version {wrong[0]} must be PACKAGE=VERSION")
    result = model_results.ModelResult.of(
        gpus.find(gpu).sku, command, created_at, content, commit,
        dict(each.split("=", 1) for each in versions),
    )  # fmt: skip
    folder = folder or model_results.shipped_folder()
    model_results.write(folder, [result])
    if as_json:
        return emit({"folder": str(folder), "key": result.key})
    echo(f"{result.model} is in {folder}")
    return None
