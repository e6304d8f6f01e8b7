"""The page of the engine: tokens a second over the batch, beside peers that ran with it."""

from __future__ import annotations

from collections.abc import Sequence

from kernelcat.report.grid import figure
from kernelcat.report.sheet import Sheet
from kernelcat.report.site import plots
from kernelcat.report.site.markup import link, page, sheet, text
from kernelcat.store.model_results import ModelResult

FILE = "engine.html"
_LEAD = (
    "The MoE engine is built from the catalog's entries. Decoding: all requests have a context of "
    "one length and write together. A time is what a caller of the engine sees."
)


def engine_page(runs: Sequence[ModelResult]) -> str:
    """Plots and tables of ``runs``, at least one, each with times of decoding."""
    parts = [f'<p class="lead">{_LEAD}</p>\n']
    for i, run in enumerate(runs):
        title = f"{run.model} on {run.gpu}, {run.created_at}"
        parts.append(
            f"<h2>{text(title)}</h2>\n<p>{_weights(run)}. GPU: {link('gpu', run.gpu)}. "
            f"Command: <code>{text(run.command)}</code></p>\n"
        )
        groups = [
            (f"batch {row['batch']}, context {row['context']}", (row["tokens_per_second"],),
             str(row["engine"]))
            for row in run.measured["decoding"]
        ]  # fmt: skip
        parts.append(plots.bars("Output tokens a second, all requests together", groups))
        parts.append(sheet(f"engine{i}", _sheet(title, run)))
    return page("The engine", "".join(parts))


def _weights(run: ModelResult) -> str:
    return "Random weights" if run.measured.get("has_random_weights") else "Published weights"


def _sheet(title: str, run: ModelResult) -> Sheet:
    headers = ("engine", "batch", "context", "tokens/s", "tokens/s of a request", "ms a step")
    lines = [
        (
            str(row["engine"]),
            str(row["batch"]),
            f"{row['context']:,}",
            f"{row['tokens_per_second']:,.0f}",
            figure(row["tokens_per_second"] / row["batch"]),
            f"{row['step_ms']:.2f}",
        )
        for row in run.measured["decoding"]
    ]
    return Sheet(title, headers, lines, (), slice(1, None))
