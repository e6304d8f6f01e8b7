"""The engine's speed in two sentences, from results of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kernelcat.report.render import NOTHING
from kernelcat.runtime.gpu import SKUS
from kernelcat.store.model_results import ModelResult


def markdown(results: Iterable[ModelResult], gpu: str, model: str) -> str:
    """What the engine and its peers write, its best prefill, and its best load by HTTP.

    Decoding is that of the newest run with most batches, one with a peer first: engine and peer
    then ran in one process.
    """
    mine = [each for each in results if (each.gpu, each.model) == (gpu, model)]
    decoded = [each for each in mine if each.measured["decoding"]]
    if not decoded:
        return f"{NOTHING}.\n"
    best = max(decoded, key=lambda each: (_peers(each), _batches(each), each.created_at))
    text = f"{_title(best)}, it writes {_rates(_rows(best, 'kernelcat'))}"
    for peer in _peers(best):
        version = f" {best.versions[peer]}" if peer in best.versions else ""
        rates = _plain_rates(_rows(best, peer))
        text += f", where {peer}{version} (in the same run) writes {rates}"
    sentences = [text]
    prefills = [each.measured["prefill"] for each in mine if each.measured["prefill"]]
    if prefills:
        fastest = min(prefills, key=lambda prefill: (-prefill["num_tokens"], prefill["ms"]))
        sentences.append(
            f"A prompt of {fastest['num_tokens']:,} tokens takes {fastest['ms']:,.0f} ms"
        )
    loads = [load["metrics"] for each in mine if each.is_served for load in each.measured["loads"]]
    if loads:
        most = max(loads, key=lambda found: found["output_throughput"])
        rate = f"{most['output_throughput']:,.0f} tokens a second"
        sentences.append(f"{most['num_complete']} requests by HTTP get {rate}")
    return ".\n".join(sentences) + ".\n"


def _title(result: ModelResult) -> str:
    weights = "with random weights at the size of " if result.measured["has_random_weights"] else ""
    context = _rows(result, "kernelcat")[0]["context"]
    name = SKUS[result.gpu].name if result.gpu in SKUS else result.gpu
    return f"On one {name}, {weights}{result.model} (context {context:,})"


def _rows(result: ModelResult, engine: str) -> list[dict[str, Any]]:
    rows = [row for row in result.measured["decoding"] if row["engine"] == engine]
    return sorted(rows, key=lambda row: int(row["batch"]))


def _peers(result: ModelResult) -> list[str]:
    return sorted({row["engine"] for row in result.measured["decoding"]} - {"kernelcat"})


def _batches(result: ModelResult) -> int:
    return len(_rows(result, "kernelcat"))


def _rates(rows: Sequence[dict[str, Any]]) -> str:
    """``605 tokens a second at batch 1, 2,652 at 8 and 10,455 at 64``."""
    units = [" tokens a second at batch", *[" at"] * (len(rows) - 1)]
    found = zip(rows, units, strict=True)
    return _joined([f"{r['tokens_per_second']:,.0f}{unit} {r['batch']}" for r, unit in found])


def _plain_rates(rows: Sequence[dict[str, Any]]) -> str:
    return _joined([f"{row['tokens_per_second']:,.0f}" for row in rows])


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
