"""The verb bench of moe: a load of requests on a server."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from kernelcat.cli.options import as_json
from kernelcat.cli.output import emit, show
from kernelcat.errors import InvalidArgument, MissingDependency


@click.command()
@click.option("--url", required=True, help="The server, http://127.0.0.1:8000.")
@click.option("--model", default="", help="The model; default: the server's first one.")
@click.option("--api-key", default="", envvar="KERNELCAT_API_KEY", help="Key of the server.")
@click.option("--vocab-size", default=0, help="Token ids are less; default: what the server says.")
@click.option("--requests", "num_requests", default=256, show_default=True, help="Requests.")
@click.option("--rate", type=float, help="Requests a second (Poisson); default: all at once.")
@click.option("--input", "input_range", default="100,1024", show_default=True, help="Tokens.")
@click.option("--output", "output_range", default="100,1024", show_default=True, help="Tokens.")
@click.option("--seed", default=0, show_default=True, help="Of lengths, arrivals and prompts.")
@click.option("--slo", default="", help="ttft=200,tpot=20,latency=5000 (milliseconds).")
@as_json
def bench(
    url: str, model: str, api_key: str, vocab_size: int, slo: str, as_json: bool, **options: Any
) -> None:
    """Put a load on a server of OpenAI's API, and print latencies, throughput and goodput.

    Lengths are uniform in the ranges; prompts are random tokens, greedy, and the end of sequence is
    ignored. TTFT counts from the time at which a request is due.

    \b
    Example:
      kernelcat moe bench --url http://127.0.0.1:8000 --rate 8 --slo ttft=500,tpot=20
    """
    from kernelcat.moe.serving_metrics import Slo, measure
    from kernelcat.moe.workload import Workload

    try:
        from kernelcat.moe.serve.load import Target, run
    except ModuleNotFoundError as error:
        raise MissingDependency(f"{error}: pip install 'kernelcat[moe]'") from error
    workload = Workload(
        options["num_requests"],
        _range(options["input_range"]),
        _range(options["output_range"]),
        options["rate"] or float("inf"),
        options["seed"],
    )
    objectives = Slo.parse(slo)
    target = Target.find(url, model, vocab_size, api_key)
    found = measure(asyncio.run(run(target, workload.arrivals(target.vocab_size))), objectives)
    if as_json:
        return emit({"url": url, "model": target.model, "workload": workload, "metrics": found})
    show(_table(found))


def _range(text: str) -> tuple[int, int]:
    """The numbers in ``100,1024``, or twice the number in ``100``."""
    try:
        first, *rest = (int(part) for part in text.split(","))
        (last,) = rest or [first]
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is no range of lengths; write 100,1024") from error
    return first, last


def _table(found: Any) -> Any:
    """The metrics as a table with a line of totals above it."""
    from rich.table import Table

    table = Table(
        title=(
            f"{found.num_complete} of {found.num_requests} requests in {found.duration_s:.1f} s, "
            f"{found.num_prompt_tokens} tokens in, {found.num_output_tokens} out: "
            f"{found.output_throughput:.1f} tokens/s, {found.request_throughput:.2f} requests/s, "
            f"goodput {found.goodput:.2f} requests/s"
        ),
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
