"""The verb bench of moe: of an engine in this process, or of a server."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelcat.cli.moe_fetch import bench_fetch, fetch_line
from kernelcat.cli.moe_interference import bench_interference
from kernelcat.cli.options import (
    as_json,
    disaggregate,
    divides_experts,
    ep,
    host_cache,
    integers,
    nvtx,
    out_file,
    profile_file,
    rebalance_every,
    require_one_division,
    short_prompt,
    split_tokens,
    tp,
)
from kernelcat.cli.output import echo, emit, save, show
from kernelcat.errors import InvalidArgument, needs_extra

if TYPE_CHECKING:
    from kernelcat.moe.bench import Decoding
    from kernelcat.moe.engine.engine import Engine
    from kernelcat.moe.engine.statistics import Statistics
    from kernelcat.moe.fetch import FetchTimes
    from kernelcat.moe.model import Decoder
    from kernelcat.moe.parallel.expert_stepping import SteppedRanks
    from kernelcat.moe.prefill import Prefill
    from kernelcat.moe.profile import StepProfile
    from kernelcat.moe.serving_metrics import ServingMetrics, Slo
    from kernelcat.moe.source import ModelSource
    from kernelcat.moe.workload import Workload


@dataclass(frozen=True)
class Load:
    """A load, and what it measured."""

    workload: Workload
    metrics: ServingMetrics

    def published(self) -> dict[str, Any]:
        """What ``--json`` prints; the rate of requests that come all at once is null."""
        workload = asdict(self.workload)
        if self.workload.rate == inf:
            workload["rate"] = None
        return {"workload": workload, "metrics": self.metrics}


@dataclass
class Results:
    """What was measured so far; ``out``, if there is one, has it too.

    ``failed`` are peers that could not be timed, with the reason.
    """

    out: Path | None
    about: dict[str, Any]
    decoding: list[Decoding] = field(default_factory=list)
    prefill: Prefill | None = None
    fetch: FetchTimes | None = None
    loads: list[Load] = field(default_factory=list)
    profiles: list[StepProfile] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    statistics: Statistics | None = None

    def keep(self) -> None:
        """Writes the file."""
        if self.out is not None:
            save(self.out, self.published())

    def published(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            **self.about,
            "decoding": self.decoding,
            "prefill": self.prefill,
            "fetch": self.fetch,
            "loads": [load.published() for load in self.loads],
            "profiles": [profile.published() for profile in self.profiles],
            "failed": self.failed,
            "statistics": self.statistics,
        }

    def print(self) -> None:
        """Tables."""
        if self.decoding:
            show(_decoding_table(self.decoding))
        if self.prefill:
            echo(_prefill_line(self.prefill))
        if self.fetch:
            echo(fetch_line(self.fetch))
        for load in self.loads:
            show(_load_table(load))
        for profile in self.profiles:
            show(profile.sheet().console())
        if self.statistics is not None and self.statistics.summary:
            echo(self.statistics.summary)


@click.command()
@click.argument("model", default="")
@click.option("--random-weights", is_flag=True, help="MODEL is a name; its weights are random.")
@click.option("--device", default="", help="cuda or cpu; default: cuda where there is a GPU.")
@click.option("--batches", default="1,8,64", show_default=True, help="Batches of decoding.")
@click.option("--context", default=1024, show_default=True, help="Tokens of decoding's prompts.")
@click.option("--tokens", default=256, show_default=True, help="Tokens written in decoding.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of decoding.")
@click.option("--prefill", default=0, help="Tokens of a prompt whose prefill is timed; 0: none.")
@click.option(
    "--fetch",
    default=0,
    help="Tokens of a prefix that is fetched from --host-cache, beside its recomputation; 0: none.",
)
@host_cache
@click.option("--step-tokens", default=2048, show_default=True, help="New tokens of a step.")
@click.option("--peer", "peers", multiple=True, help="Also time decoding of: transformers.")
@tp
@ep
@split_tokens
@rebalance_every
@disaggregate
@short_prompt
@click.option("--memory", default=0.9, show_default=True, help="Part of the GPU's memory to take.")
@click.option("--cache-dtype", default="", help="Element type of the caches: float8_e4m3fn.")
@click.option("--drafts", default=0, show_default=True, help="Draft tokens of n-gram speculation.")
@click.option("--url", default="", help="Server to time, http://127.0.0.1:8000.")
@click.option("--api-key", default="", envvar="KERNELCAT_API_KEY", help="Key of the server.")
@click.option("--vocab-size", default=0, help="Token ids are less; default: what the server says.")
@click.option("--requests", default=256, show_default=True, help="Requests of a load; 0 for none.")
@click.option(
    "--rate",
    "rates",
    type=float,
    multiple=True,
    help="Requests a second (Poisson); may be repeated; inf and default: all at once.",
)
@click.option("--input", "inputs", default="100,1024", show_default=True, help="Prompt lengths.")
@click.option("--output", "outputs", default="100,1024", show_default=True, help="Output lengths.")
@click.option("--seed", default=0, show_default=True, help="Of lengths, arrivals and prompts.")
@click.option("--slo", default="", help="ttft=200,tpot=20,latency=5000 (milliseconds).")
@out_file
@profile_file
@nvtx
@as_json
def bench(
    model: str, url: str, requests: int, rates: tuple[float, ...], inputs: str, outputs: str,
    seed: int, slo: str, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Time MODEL in this process, or the server at --url.

    In this process: the time to the first token of a prefix that comes from host memory, decoding
    at fixed batches, the prefill of one long prompt beside a product of large matrices, then loads
    of requests. A server gets the loads; MODEL is then its model's name,
    by default that of the first one.

    Lengths of a load are uniform in the ranges; prompts are random tokens, greedy, and the end of
    sequence is ignored. TTFT counts from the time at which a request is due. Decoding is timed
    while all requests write. A line on standard error tells of each result as soon as it is there.
    A peer that fails is told, and the rest goes on.

    With --disaggregate the inter-token latency of requests that write is measured, before and while
    prompts of --prefill tokens arrive at --rate: of one engine, then of two.

    \b
    Example:
      kernelcat moe bench gpt-oss-20b --random-weights --peer transformers
      kernelcat moe bench gpt-oss-20b --random-weights --batches 1 --profile step.json
      kernelcat moe bench gpt-oss-20b --random-weights --ep 2 --batches 64 --profile step.json
      kernelcat moe bench gpt-oss-20b --random-weights --fetch 4096 --host-cache 4 --requests 0
      kernelcat moe bench --url http://127.0.0.1:8000 --rate 8 --slo ttft=500,tpot=20
      kernelcat moe bench gpt-oss-20b --random-weights --disaggregate \\
        --batches 32 --tokens 2048 --prefill 8192 --rate 4
    """
    with needs_extra("moe"):
        from kernelcat.moe.serving_metrics import Slo
        from kernelcat.moe.workload import Workload
    ranges, objectives = (_range(inputs), _range(outputs)), Slo.parse(slo)
    loads = [Workload(requests, *ranges, rate, seed) for rate in rates or (inf,) if requests]
    if url and (options["profile"] or options["nvtx"]):
        raise InvalidArgument("--profile and --nvtx are for a MODEL in this process, not for --url")
    require_one_division(options)
    if options["disaggregate"]:
        if url or not model:
            raise InvalidArgument("--disaggregate is for a MODEL, not for --url")
        return bench_interference(model, rates, options, as_json)
    if url:
        results = _bench_server(url, model, loads, objectives, options)
    elif model:
        results = _bench_engine(model, loads, objectives, options)
    else:
        raise InvalidArgument("bench needs a MODEL, or the --url of a server")
    return emit(results.published()) if as_json else results.print()


def _bench_server(
    url: str, model: str, loads: list[Workload], slo: Slo, options: dict[str, Any]
) -> Results:
    """Loads on the server at ``url``."""
    from kernelcat.moe.serving_metrics import measure

    with needs_extra("moe"):
        from kernelcat.moe.serve.load import Target, run
    target = Target.find(url, model, options["vocab_size"], options["api_key"])
    results = Results(options["out"], {"url": url, "model": target.model})
    for load in loads:
        timelines = asyncio.run(run(target, load.arrivals(target.vocab_size)))
        results.loads.append(_told(Load(load, measure(timelines, slo))))
        results.keep()
    return results


def _bench_engine(model: str, loads: list[Workload], slo: Slo, options: dict[str, Any]) -> Results:
    """Decoding and loads of an engine in this process, and decoding of peers before it."""
    import torch

    from kernelcat.moe import ranges
    from kernelcat.moe.bench import time_decoding, time_load
    from kernelcat.moe.engine.engine import Engine
    from kernelcat.moe.prefill import time_prefill
    from kernelcat.moe.source import ModelSource

    batches = integers(options["batches"], "must be positive numbers like 1,8,64")
    context, tokens, rounds = (options[name] for name in ("context", "tokens", "rounds"))
    if context < 1 or tokens < 2 or rounds < 1:
        raise InvalidArgument(
            f"context={context} and rounds={rounds} must be positive, tokens={tokens} at least 2"
        )
    prefill = options["prefill"]
    if options["fetch"] and (options["fetch"] < 1 or not options["host_cache"]):
        raise InvalidArgument(
            f"--fetch {options['fetch']} must be a number of tokens, and needs --host-cache"
        )
    is_divided = divides_experts(options["ep"], options["rebalance_every"])
    if is_divided and (prefill or options["fetch"] or options["nvtx"]):
        raise InvalidArgument("--prefill, --fetch and --nvtx are for one process, not for --ep")
    if prefill < 0:
        raise InvalidArgument(f"--prefill {prefill} must be a number of tokens, or 0 for none")
    random, device = options["random_weights"], options["device"]
    source = ModelSource.find(
        model, device, random, tell=lambda line: echo(line, err=True), tp=options["tp"]
    )
    is_cuda = source.device == "cuda"
    if not is_cuda:
        echo("no GPU is used: these are times of the catalog's oracles", err=True)
    name = torch.cuda.get_device_name() if is_cuda else "cpu"
    about = {
        "model": source.name, "has_random_weights": random, "device": name,
        "tp": source.tp, "ep": options["ep"],
    }  # fmt: skip
    results = Results(options["out"], about)
    _time_peers(source, options["peers"], (batches, context, tokens, rounds), results)
    lengths = [load.input_range[1] + load.output_range[1] for load in loads]
    most = [*batches, *(load.num_requests for load in loads)]
    with ranges.for_nvtx() if options["nvtx"] else nullcontext():
        decoder = None if is_divided else _opened(source)
        if decoder is not None and options["fetch"]:
            results.fetch = bench_fetch(decoder, options)
            results.keep()
        length = max(context + tokens, *lengths, prefill + 1)
        engine = _engine(source, decoder, length, max(most), options)
        for batch in batches:
            results.decoding.append(
                _told_rate(time_decoding(engine, batch, context, tokens, rounds))
            )
            results.keep()
        if prefill and isinstance(engine, Engine):
            results.prefill = time_prefill(engine, prefill)
            echo(_prefill_line(results.prefill), err=True)
            results.keep()
        for load in loads:
            results.loads.append(_told(Load(load, time_load(engine, load, slo))))
            results.keep()
    if options["profile"]:
        results.profiles += _profiles(engine, options["profile"], batches, context)
    results.statistics = engine.statistics()
    results.keep()
    engine.close()
    return results


def _profiles(
    engine: Engine | SteppedRanks, path: Path, batches: list[int], context: int
) -> list[StepProfile]:
    """A profile of each batch; several files have the batch in their names."""
    from kernelcat.moe.bench import prompts
    from kernelcat.moe.parallel.expert_stepping import profile_steps

    found = []
    for batch in batches:
        trace = path if len(batches) == 1 else path.with_name(f"{path.stem}-{batch}{path.suffix}")
        texts = prompts(batch, context, engine.limits.vocab_size, seed=batch)
        found.append(profile_steps(engine, texts, trace))
    return found


def _time_peers(
    source: ModelSource, peers: tuple[str, ...], what: tuple[Any, ...], results: Results
) -> None:
    """Decoding of peers; their memory is free afterwards."""
    import gc

    import torch

    from kernelcat.moe.engine.request import describe
    from kernelcat.moe.peers import PEERS, load_transformers, time_transformers

    batches, context, tokens, rounds = what

    def done(result: Decoding) -> None:
        results.decoding.append(_told_rate(result))
        results.keep()

    for peer in peers:
        if peer not in PEERS:
            raise InvalidArgument(f"--peer {peer!r} must be one of {', '.join(PEERS)}")
    for peer in peers:
        config, folder = source.config(), None if source.has_random_weights else source.model
        theirs = None
        try:
            theirs = load_transformers(config, folder, source.device)
            time_transformers(theirs, config.vocab_size, batches, context, tokens, rounds, done)
        except (RuntimeError, ValueError, TypeError) as error:  # other people's code
            results.failed[peer] = describe(error)
            echo(f"{peer} has failed: {results.failed[peer]}", err=True)
            results.keep()
        del theirs
        gc.collect()
        if source.device == "cuda":
            torch.cuda.empty_cache()


def _opened(source: ModelSource) -> Decoder:
    start = time.perf_counter()
    model = source.open()
    echo(f"weights after {time.perf_counter() - start:.1f} s", err=True)
    return model


def _engine(
    source: ModelSource, model: Decoder | None, length: int, batch: int, options: dict[str, Any]
) -> Engine | SteppedRanks:
    """An engine for ``batch`` requests of ``length`` tokens at once, as far as there is room."""
    from kernelcat.moe.engine.engine import Engine
    from kernelcat.moe.engine.limits import Limits
    from kernelcat.moe.engine.settings import EngineSettings
    from kernelcat.moe.engine.speculation import Speculation
    from kernelcat.moe.parallel.expert_stepping import SteppedRanks

    running, start = min(batch, 256), time.perf_counter()
    limits = Limits(
        max(options["step_tokens"], running), running, max_waiting=max(batch, 1024), context=length
    )
    settings = EngineSettings(
        limits,
        memory=options["memory"],
        cache_dtype=options["cache_dtype"],
        speculation=Speculation(options["drafts"]) if options["drafts"] else None,
        host_cache_bytes=options["host_cache"],
        split_tokens=options["split_tokens"],
    )
    if model is None:
        ranks = SteppedRanks(source, settings, options["ep"], options["rebalance_every"])
        echo(f"all ranks after {time.perf_counter() - start:.1f} s", err=True)
        return ranks
    engine = Engine(model, settings)
    echo(f"engine after {time.perf_counter() - start:.1f} s", err=True)
    return engine


def _range(text: str) -> tuple[int, int]:
    """The numbers in ``100,1024``, or twice the number in ``100``."""
    rule = "is no range of lengths; write 100,1024"
    first, *rest = integers(text, rule)
    if len(rest) > 1:
        raise InvalidArgument(f"{text!r} {rule}")
    return first, rest[0] if rest else first


def _told_rate(result: Decoding) -> Decoding:
    """``result``, after a line about it, so that an interrupted run loses nothing."""
    rounds = ", ".join(f"{rate:,.1f}" for rate in result.rounds)
    echo(
        f"{result.engine}, batch {result.batch}, context {result.context}: "
        f"{result.tokens_per_second:,.1f} tokens/s (rounds: {rounds}), "
        f"{result.step_ms:.3f} ms a token, prefill {result.prefill_ms:.1f} ms",
        err=True,
    )
    return result


def _told(load: Load) -> Load:
    """``load``, after a line about it."""
    times = [
        f"{name.upper()} p50 {values.p50:.2f} p99 {values.p99:.2f} ms"
        for name in ("ttft", "tpot", "itl", "latency")
        if (values := getattr(load.metrics, f"{name}_ms")) is not None
    ]
    echo(", ".join([_load_title(load), *times]), err=True)
    return load


def _prefill_line(prefill: Prefill) -> str:
    return (
        f"prefill of {prefill.num_tokens} tokens: {prefill.ms:.1f} ms, "
        f"{prefill.tflops:.1f} TFLOP/s, {100 * prefill.share:.0f} % of the "
        f"{prefill.matrix_tflops:.1f} of a product of matrices of {prefill.matrix_size} rows"
    )


def _load_title(load: Load) -> str:
    """The rate of a load, and what it brought in total."""
    found, rate = load.metrics, load.workload.rate
    return (
        f"{'all at once' if rate == inf else f'{rate:g} requests/s'}: "
        f"{found.num_complete} of {found.num_requests} requests in {found.duration_s:.1f} s, "
        f"{found.num_prompt_tokens} tokens in, {found.num_output_tokens} out: "
        f"{found.output_throughput:.1f} tokens/s, {found.request_throughput:.2f} requests/s, "
        f"goodput {found.goodput:.2f} requests/s"
    )


def _decoding_table(results: list[Decoding]) -> Any:
    from rich.table import Table

    table = Table("engine", "batch", "context", "tokens/s", "ms a token", "prefill ms")
    for r in results:
        table.add_row(
            r.engine, str(r.batch), str(r.context), f"{r.tokens_per_second:,.1f}",
            f"{r.step_ms:.3f}", f"{r.prefill_ms:.1f}",
        )  # fmt: skip
    return table


def _load_table(load: Load) -> Any:
    """The metrics as a table with a line of totals above it."""
    from rich.table import Table

    found = load.metrics
    table = Table(
        title=_load_title(load),
        caption="; ".join(f"{count} failed: {name}" for name, count in found.errors.items()),
    )
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    for name in ("ms", *columns):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for name in ("ttft", "tpot", "itl", "latency"):
        values = getattr(found, f"{name}_ms")
        if values is not None:
            table.add_row(name, *(f"{getattr(values, column):.2f}" for column in columns))
    return table
