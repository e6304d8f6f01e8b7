"""The page of the engine: tokens a second over the batch, beside peers that ran with it, and
what fetched prefixes and arriving prompts take, beside other ways."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from kernelcat.report.engine_sheets import fetch_sheet, interference_sheet
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


def engine_page(runs: Sequence[ModelResult], gpus: Collection[str]) -> str:
    """Plots and tables of ``runs``, at least one: a part for each model and GPU, newest first.
    ``gpus`` have a page of their own."""
    parts = [f'<p class="lead">{_LEAD}</p>\n']
    ordered = sorted(runs, key=lambda run: (run.created_at, len(_decoding(run))), reverse=True)
    ordered.sort(key=_subject)
    number = 0
    for (model, gpu), group in groupby(ordered, key=_subject):
        named = link("gpu", gpu) if gpu in gpus else text(gpu)
        parts.append(f"<h2>{text(model)} on {named}</h2>\n")
        for place, run in enumerate(group, 1):
            parts.append(_run(run, f"engine{number}", f"run {place} of {model}"))
            number += 1
    return page("The engine", "".join(parts))


def _subject(run: ModelResult) -> tuple[str, str]:
    return run.model, run.gpu


def _decoding(run: ModelResult) -> list[dict[str, Any]]:
    """The rows of decoding, engines of one batch beside each other."""
    rows = run.measured.get("decoding") or ()
    return sorted(rows, key=lambda row: (row["context"], row["batch"], row["engine"]))


def _run(run: ModelResult, name: str, words: str) -> str:
    """One run; ``name`` begins the names of its tables, ``words`` their captions."""
    weights = "random" if run.measured.get("has_random_weights") else "published"
    served = " by HTTP" if run.is_served else f", {weights} weights"
    parts = [f"<h3>{text(words[:1].upper() + words[1:])}, {text(run.created_at)}{served}</h3>\n"
             f"<p>Command: <code>{text(run.command)}</code></p>\n"]  # fmt: skip
    decoding = _decoding(run)
    groups = [
        (f"batch {row['batch']}, {row['engine']}", (row["tokens_per_second"],), "")
        for row in decoding
    ]
    if len(groups) > 1:
        parts.append(plots.bars("Output tokens a second, all requests together", groups))
    if decoding:
        parts.append(sheet(name, _decoding_sheet(f"Decoding, {words} on {run.gpu}", decoding)))
    if prefill := run.measured.get("prefill"):
        parts.append(
            f"<p>A prompt of {prefill['num_tokens']:,} tokens takes {prefill['ms']:,.0f} ms: "
            f"{prefill['tflops']:,.0f} TFLOP/s, {prefill['share']:.0%} of what one large matrix "
            "product reaches.</p>\n"
        )
    if loads := run.measured.get("loads"):
        parts.append(sheet(f"{name}-loads", _loads_sheet(f"Requests, {words} on {run.gpu}", loads)))
    if fetch := run.measured.get("fetch"):
        title = f"A prefix from host memory, {words} on {run.gpu}"
        parts.append(sheet(f"{name}-fetch", fetch_sheet(title, fetch)))
    if interference := run.measured.get("interference"):
        title = f"Prompts and decoding on a GPU each, {words} on {run.gpu}"
        parts.append(sheet(f"{name}-interference", interference_sheet(title, interference)))
    return "".join(parts)


def _decoding_sheet(title: str, rows: Sequence[dict[str, Any]]) -> Sheet:
    headers = ("engine", "batch", "context", "tokens/s", "of a request", "ms a step")
    lines = [
        (
            str(row["engine"]),
            str(row["batch"]),
            f"{row['context']:,}",
            f"{row['tokens_per_second']:,.0f}",
            figure(row["tokens_per_second"] / row["batch"]),
            f"{row['step_ms']:.2f}",
        )
        for row in rows
    ]
    return Sheet(title, headers, lines, (), slice(1, None))


def _loads_sheet(title: str, loads: Sequence[dict[str, Any]]) -> Sheet:
    headers = ("requests", "tokens/s", "first token, ms", "99 %", "between tokens, ms", "99 %")
    lines = [
        (
            f"{metrics['num_complete']:,} of {metrics['num_requests']:,}",
            f"{metrics['output_throughput']:,.0f}",
            *(f"{metrics[name][share]:,.0f}" if name in metrics else ""
              for name in ("ttft_ms", "itl_ms") for share in ("p50", "p99")),
        )
        for metrics in (load["metrics"] for load in loads)
    ]  # fmt: skip
    notes = ("Times are medians, and beside them the time that 99 % of the requests keep.",)
    return Sheet(title, headers, lines, notes, slice(1, None))
