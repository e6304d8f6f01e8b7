"""The verb export: results in the formats of other projects."""

from __future__ import annotations

from pathlib import Path

import click

from kernelcat.cli.options import as_json, database
from kernelcat.cli.output import echo, emit

FORMATS = ("flashinfer-bench", "vllm")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--format", "form", type=click.Choice(FORMATS), required=True,
              help="flashinfer-bench: definitions, workloads and traces. vllm: configurations of "
              "its Triton kernels for fused MoE and block FP8.")  # fmt: skip
@click.option("--gpu", help="Export only results of this SKU.")
@as_json
@database
def export(folder: Path, form: str, gpu: str | None, url: str | None, as_json: bool) -> None:
    """Write results into FOLDER in the format of another project, and say what is left out.

    Results are shipped and local ones, as in leaderboard. kernelcat db export writes kernelcat's
    own format.

    \b
    Example:
      kernelcat export traces --format flashinfer-bench --gpu h200
    """
    from kernelcat.report.board import load
    from kernelcat.report.exchange import flashinfer_bench, vllm
    from kernelcat.runtime import gpu as gpus
    from kernelcat.store import plausibility

    sku = gpus.find(gpu).sku if gpu else None
    rows = [row for row in load(sku, None, "graph", url) if plausibility.doubt(row) is None]
    made = (vllm if form == "vllm" else flashinfer_bench).export(rows)
    files = made.write(folder)
    if as_json:
        left_out = {f"{entry}: {problem}": why for (entry, problem), why in made.left_out.items()}
        return emit({"files": [str(file) for file in files], "left_out": left_out})
    for reason in made.reasons():
        echo(f"left out: {reason}", err=True)
    echo(f"{folder}: {len(files)} files; {len(made.left_out)} problems left out")
