"""The verb serve of moe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kernelcat.cli.options import (
    as_json,
    disaggregate,
    divides_experts,
    ep,
    host_cache,
    rebalance_every,
    require_one_division,
    short_prompt,
    tp,
)
from kernelcat.cli.output import echo, emit
from kernelcat.errors import needs_extra

if TYPE_CHECKING:
    from kernelcat.moe.engine.served_engine import ServedEngine
    from kernelcat.moe.engine.settings import EngineSettings

CPU_CONTEXT = 1024
"""Tokens of a request on a CPU by default: oracles copy the whole cache."""


@click.command()
@click.argument("model")
@click.option("--random-weights", is_flag=True, help="MODEL is a name; its weights are random.")
@click.option("--device", default="", help="cuda or cpu; default: cuda where there is a GPU.")
@click.option("--name", default="", help="The model's name in requests; default: MODEL's own.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=8000, show_default=True, help="Port; 0 for any free one.")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="KERNELCAT_API_KEY",
    help="Key that clients must present; may be repeated. Default: no authentication.",
)
@tp
@disaggregate
@short_prompt
@click.option("--memory", default=0.9, show_default=True, help="Part of the GPU's memory to take.")
@click.option(
    "--cpu-cache", default=64 << 20, show_default=True, help="Bytes of the caches on a CPU."
)
@host_cache
@click.option("--context", type=int, help="Tokens of a request with its prompt, at most.")
@click.option("--max-running", type=int, help="Requests that a step computes, at most.")
@click.option("--max-waiting", type=int, help="Requests that wait, at most.")
@click.option("--step-tokens", type=int, help="New tokens that a step computes, at most.")
@click.option("--cache-dtype", default="", help="Element type of the caches: float8_e4m3fn.")
@click.option("--drafts", default=0, show_default=True, help="Draft tokens of n-gram speculation.")
@ep
@rebalance_every
@click.option("--max-body", default=8 << 20, show_default=True, help="Bytes of a request, at most.")
@click.option(
    "--grace", default=30.0, show_default=True, help="Seconds for running requests after SIGTERM."
)
@as_json
def serve(
    model: str, random_weights: bool, device: str, name: str, tp: int, as_json: bool, **options: Any
) -> None:
    """Serve MODEL by OpenAI's API: a folder with a checkpoint, or smollm2.

    SIGTERM ends the server: running requests may end, those left get an error.

    \b
    Example:
      kernelcat moe serve smollm2
      kernelcat moe serve gpt-oss-20b --port 8000 --tp 2
      kernelcat moe serve gpt-oss-20b --port 8000 --ep 2 --rebalance-every 1000
      kernelcat moe serve gpt-oss-20b --port 8000 --disaggregate
      kernelcat moe serve small-llama --random-weights --device cpu
    """
    with needs_extra("moe"):
        from kernelcat.moe.disaggregate.front import Disaggregated
        from kernelcat.moe.disaggregate.router import Router
        from kernelcat.moe.engine.engine import EngineError
        from kernelcat.moe.parallel.expert_engines import ExpertEngines
        from kernelcat.moe.serve.app import make_app
        from kernelcat.moe.serve.engine_process import EngineProcess
        from kernelcat.moe.serve.server import make_server
        from kernelcat.moe.serve.service import Service
        from kernelcat.moe.serve.settings import Settings
        from kernelcat.moe.source import ModelSource
    require_one_division({"tp": tp, **options})
    source = ModelSource.find(
        model, device, random_weights, tell=lambda line: echo(line, err=True), tp=tp
    )
    settings = Settings(
        name or source.name,
        **{field: options[field] for field in ("host", "port", "api_keys", "max_body", "grace")},
    )
    if source.device == "cpu" and options["context"] is None:
        options["context"] = CPU_CONTEXT
    engine: ServedEngine
    ranks, every = options["ep"], options["rebalance_every"]
    if divides_experts(ranks, every):
        engine = ExpertEngines(source, _settings(options), ranks, every)
    elif options["disaggregate"]:
        engine = Disaggregated(source, _settings(options), Router(options["short_prompt"]))
    else:
        engine = EngineProcess(source, _settings(options))
    service = Service(engine, source.tokenizer(), settings)

    def announce(url: str) -> None:
        if as_json:
            return emit({"model": settings.model, "url": f"{url}/v1"})
        echo(f"{settings.model} is served at {url}/v1")

    server = make_server(make_app(service), service, announce)
    server.run()
    if server.has_failed:
        raise EngineError("the engine has stopped, so the server has ended")


def _settings(options: dict[str, Any]) -> EngineSettings:
    """The engine's settings."""
    from kernelcat.moe.engine.limits import Limits
    from kernelcat.moe.engine.settings import EngineSettings
    from kernelcat.moe.engine.speculation import Speculation

    names = ("context", "max_running", "max_waiting", "step_tokens")
    limits = Limits(**{name: options[name] for name in names if options[name] is not None})
    return EngineSettings(
        limits,
        memory=options["memory"],
        cpu_cache_bytes=options["cpu_cache"],
        cache_dtype=options["cache_dtype"],
        speculation=Speculation(options["drafts"]) if options["drafts"] else None,
        host_cache_bytes=options["host_cache"],
    )
