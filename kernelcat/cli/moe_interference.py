"""`moe bench --disaggregate`: what long prompts cost requests that write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kernelcat.cli.options import integers
from kernelcat.cli.output import echo, emit, save, show
from kernelcat.errors import InvalidArgument

if TYPE_CHECKING:
    from kernelcat.moe.disaggregate.interference import Interference, Traffic
    from kernelcat.moe.engine.served_engine import ServedEngine
    from kernelcat.moe.engine.settings import EngineSettings
    from kernelcat.moe.source import ModelSource


def bench_interference(
    model: str, rates: tuple[float, ...], options: dict[str, Any], as_json: bool
) -> None:
    """Measures one engine, then two, for each batch; the table, or JSON."""
    import torch

    from kernelcat.moe.disaggregate.interference import Traffic, measure
    from kernelcat.moe.source import ModelSource

    batches = integers(options["batches"], "must be positive numbers like 1,8,64")
    if len(rates) != 1 or not options["prefill"]:
        raise InvalidArgument(
            "--disaggregate needs --prefill, the tokens of the prompts that arrive, and one --rate"
        )
    context, tokens, prefill = (options[name] for name in ("context", "tokens", "prefill"))
    traffics = [Traffic(batch, context, tokens, prefill, rates[0]) for batch in batches]
    random, device = options["random_weights"], options["device"]
    source = ModelSource.find(model, device, random, tell=lambda line: echo(line, err=True))
    name = torch.cuda.get_device_name() if source.device == "cuda" else "cpu"
    about = {"model": source.name, "has_random_weights": random, "device": name}
    found: list[Interference] = []
    for traffic in traffics:
        settings = _settings(traffic, options)
        for kind, opened in _engines(source, settings, options["short_prompt"]).items():
            found.append(asyncio.run(measure(kind, opened(), traffic)))
            echo(_line(found[-1]), err=True)
            if options["out"] is not None:
                save(options["out"], _published(about, found))
    return emit(_published(about, found)) if as_json else show(_table(found))


def _engines(
    source: ModelSource, settings: EngineSettings, short_prompt: int
) -> dict[str, Callable[[], ServedEngine]]:
    """Name -> opens the engine: both do not fit into one GPU."""
    from kernelcat.moe.disaggregate.front import Disaggregated
    from kernelcat.moe.disaggregate.router import Router
    from kernelcat.moe.serve.engine_process import EngineProcess

    return {
        "colocated": lambda: EngineProcess(source, settings),
        "disaggregated": lambda: Disaggregated(source, settings, Router(short_prompt)),
    }


def _settings(traffic: Traffic, options: dict[str, Any]) -> EngineSettings:
    """An engine with room for all that write, and for prompts beside them."""
    from kernelcat.moe.engine.limits import Limits
    from kernelcat.moe.engine.settings import EngineSettings
    from kernelcat.moe.engine.speculation import Speculation

    running = traffic.batch + 8
    length = max(traffic.context + traffic.num_tokens, traffic.prompt_tokens + 1)
    limits = Limits(max(options["step_tokens"], running), running, context=length)
    return EngineSettings(
        limits,
        memory=options["memory"],
        cache_dtype=options["cache_dtype"],
        speculation=Speculation(options["drafts"]) if options["drafts"] else None,
    )


def _published(about: dict[str, Any], found: list[Interference]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {**about, "interference": [{**asdict(each), "ratio": each.ratio} for each in found]}


def _line(each: Interference) -> str:
    return (
        f"{each.engine}, batch {each.traffic.batch}: inter-token latency p99 "
        f"{each.idle_ms.p99:.2f} ms alone, {each.loaded_ms.p99:.2f} ms while prompts of "
        f"{each.traffic.prompt_tokens} tokens arrive ({each.ratio:.2f} times)"
    )


def _table(found: list[Interference]) -> Any:
    from rich.table import Table

    first = found[0].traffic
    table = Table(
        title=f"Inter-token latency in ms; prompts of {first.prompt_tokens} tokens, "
        f"{first.rate:g} a second"
    )
    columns = ("batch", "p50 alone", "p99 alone", "p50", "p99", "p99 / alone", "prompt p50")
    for name in ("engine", *columns):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for each in found:
        idle, loaded, prompt = each.idle_ms, each.loaded_ms, each.prompt_ms
        table.add_row(
            each.engine, str(each.traffic.batch),
            *(f"{value:.2f}" for value in (idle.p50, idle.p99, loaded.p50, loaded.p99, each.ratio)),
            f"{prompt.p50:.1f}" if prompt else "",
        )  # fmt: skip
    return table
