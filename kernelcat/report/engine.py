"""The engine's speed in a few sentences, from results of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kernelcat.report import engine_page
from kernelcat.report.render import NOTHING
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.gpu import SKUS
from kernelcat.store.model_results import ModelResult


def markdown(results: Iterable[ModelResult], gpu: str, model: str) -> str:
    """What the engine and its peers write, its best prefill, its best load by HTTP, what two GPUs
    write, and what prompts cost that arrive.

    Decoding is that of the newest run with most batches, one with a peer first: engine and peer
    then ran in one process. What prompts cost is that of the newest run on any GPUs, and says
    which.
    """
    of_model = [each for each in results if each.model == model]
    mine = [each for each in of_model if each.gpu == gpu]
    decoded = [each for each in mine if each.measured.get("decoding")]
    if not decoded:
        return f"{NOTHING}.\n"
    best = max(decoded, key=lambda each: (_peers(each), _batches(each), each.created_at))
    text = f"{_title(best)}, it writes {_rates(_rows(best))}"
    for peer in _peers(best):
        version = f" {best.versions[peer]}" if peer in best.versions else ""
        rates = _plain_rates(_rows(best, peer))
        text += f", where {peer}{version} (in the same run) writes {rates}"
    sentences = [text]
    prefills = [prefill for each in mine if (prefill := each.measured.get("prefill"))]
    if prefills:
        fastest = min(prefills, key=lambda prefill: (-prefill["num_tokens"], prefill["ms"]))
        sentences.append(
            f"A prompt of {fastest['num_tokens']:,} tokens takes {fastest['ms']:,.0f} ms"
        )
    served = [each.measured.get("loads", ()) for each in mine if each.is_served]
    loads = [load["metrics"] for of_one in served for load in of_one]
    if loads:
        most = max(loads, key=lambda found: found["output_throughput"])
        rate = f"{most['output_throughput']:,.0f} tokens a second"
        sentences.append(f"{most['num_complete']} requests by HTTP get {rate}")
    sentences += _of_two(of_model, gpu) + _of_prompts(of_model)
    return ".\n".join(sentences) + ".\n"


def _of_two(results: Sequence[ModelResult], gpu: str) -> list[str]:
    """How many times the tokens of one GPU two of them write, where both ran at one commit."""
    rate_of_one: dict[tuple[str, int], float] = {}
    for each in results:
        if each.gpu == gpu:
            rows = _rows(each)
            rate_of_one |= {(each.commit, r["batch"]): r["tokens_per_second"] for r in rows}
    said, unit = list[str](), " times as many tokens at batch"
    for option in ("tp", "ep"):
        times: dict[int, float] = {}
        for each in sorted(results, key=lambda each: each.created_at):
            if each.gpu.startswith(f"{gpu}x2-") and each.measured.get(option) == 2:
                for row in _rows(each):
                    if rate := rate_of_one.get((each.commit, row["batch"])):
                        times[row["batch"]] = row["tokens_per_second"] / rate
        rates = list[str]()
        for batch in sorted(times):
            rates.append(f"{times[batch]:.2f}{unit} {batch}")
            unit = " at"
        said += [f"{_joined(rates)} (`--{option} 2`)"] if rates else []
    return [f"Two GPUs write {', '.join(said)}"] if said else []


def _of_prompts(results: Sequence[ModelResult]) -> list[str]:
    """How long tokens take while prompts arrive, beside one GPU that does all: the largest batch
    of the newest run."""
    measured = [each for each in results if each.measured.get("interference")]
    if not measured:
        return []
    newest = max(measured, key=lambda each: each.created_at)
    of_batch = sorted(newest.measured["interference"], key=lambda run: int(run["traffic"]["batch"]))
    last = {run["engine"]: run for run in of_batch}
    apart, together = (last[name]["loaded_ms"]["p99"] for name in ("disaggregated", "colocated"))
    traffic = of_batch[-1]["traffic"]
    return [
        f"While prompts of {traffic['prompt_tokens']:,} tokens arrive, 99 % of the times between "
        f"tokens of {traffic['batch']} requests are below {apart:,.0f} ms where one GPU computes "
        f"prompts and a second one writes (`--disaggregate`), {together:,.0f} ms where one does "
        f"both ({gpus.find(newest.gpu).name}; [tables](docs/results/{engine_page.FILE}))"
    ]


def _title(result: ModelResult) -> str:
    weights = "with random weights at the size of " if result.measured["has_random_weights"] else ""
    context = _rows(result)[0]["context"]
    name = SKUS[result.gpu].name if result.gpu in SKUS else result.gpu
    return f"On one {name}, {weights}{result.model} (context {context:,})"


def _rows(result: ModelResult, engine: str = "kernelcat") -> list[dict[str, Any]]:
    rows = [row for row in result.measured.get("decoding", ()) if row["engine"] == engine]
    return sorted(rows, key=lambda row: int(row["batch"]))


def _peers(result: ModelResult) -> list[str]:
    return sorted({row["engine"] for row in result.measured["decoding"]} - {"kernelcat"})


def _batches(result: ModelResult) -> int:
    return len(_rows(result))


def _rates(rows: Sequence[dict[str, Any]]) -> str:
    """``605 tokens a second at batch 1, 2,652 at 8 and 10,455 at 64``."""
    units = [" tokens a second at batch", *[" at"] * (len(rows) - 1)]
    found = zip(rows, units, strict=True)
    return _joined([f"{r['tokens_per_second']:,.0f}{unit} {r['batch']}" for r, unit in found])


def _plain_rates(rows: Sequence[dict[str, Any]]) -> str:
    return _joined([f"{row['tokens_per_second']:,.0f}" for row in rows])


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
