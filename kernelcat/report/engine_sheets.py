"""Tables of the engine that the site and docs/results share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelcat.report.sheet import Sheet


def fetch_sheet(title: str, fetch: Mapping[str, Any]) -> Sheet:
    """A prefix that comes from host memory, beside its recomputation."""
    headers = (
        "prefix", "fetched, ms", "recomputed, ms", "× recomputed", "shared, ms", "MB", "GB/s",
    )  # fmt: skip
    line = (
        f"{fetch['num_tokens']:,} tokens",
        *(f"{fetch[name]:.2f}" for name in ("fetched_ms", "recomputed_ms", "speedup", "shared_ms")),
        f"{fetch['num_bytes'] / 1e6:,.1f}",
        f"{fetch['bandwidth'] / 1e9:.1f}",
    )
    notes = (
        "Medians of the time from a request to its first token, where the prefix comes from host "
        "memory, is computed again, or lies in pages of the GPU.",
        "× recomputed is the time of recomputation over that of the fetch.",
        "A fetch copies the MB; GB/s are those of such a copy alone.",
    )
    return Sheet(title, headers, [line], notes, slice(1, None))


def interference_sheet(title: str, runs: Sequence[Mapping[str, Any]]) -> Sheet:
    """What prompts cost requests that write, where one GPU does both and where two share it."""
    headers = (
        "engine", "batch", "p50 alone", "p99 alone", "p50", "p99", "p99 / alone", "prompt p50",
    )  # fmt: skip
    ordered = sorted(runs, key=lambda run: (run["traffic"]["batch"], run["engine"]))
    traffic = ordered[0]["traffic"]
    notes = (
        f"Milliseconds between two tokens of requests that write {traffic['num_tokens']:,} tokens "
        f"after prompts of {traffic['context']:,}: alone, and while {traffic['rate']:g} prompts of "
        f"{traffic['prompt_tokens']:,} tokens a second arrive.",
        "prompt p50 is the time from the arrival of such a prompt to its token.",
        "colocated: one GPU computes prompts and writes.",
        "disaggregated: one GPU computes prompts, a second one writes.",
    )
    return Sheet(title, headers, list(map(_interference_line, ordered)), notes, slice(1, None))


def _interference_line(run: Mapping[str, Any]) -> tuple[str, ...]:
    idle, loaded, prompt = run["idle_ms"], run["loaded_ms"], run["prompt_ms"]
    return (
        str(run["engine"]),
        str(run["traffic"]["batch"]),
        *(f"{times[share]:.2f}" for times in (idle, loaded) for share in ("p50", "p99")),
        f"{run['ratio']:.2f}",
        f"{prompt['p50']:.1f}" if prompt else "",
    )
