"""The verb ladder of moe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelcat.cli.options import as_json, integers, out_file
from kernelcat.cli.output import echo, emit, save, show
from kernelcat.errors import InvalidArgument, KernelcatError, needs_extra

if TYPE_CHECKING:
    from kernelcat.moe.ladder import Result


@click.command()
@click.argument("model")
@click.option("--random-weights", is_flag=True, help="MODEL is a name; its weights are random.")
@click.option("--device", default="", help="cuda or cpu; default: cuda where there is a GPU.")
@click.option("--batches", default="1,8,64", show_default=True, help="Batches of decoding.")
@click.option("--context", default=1024, show_default=True, help="Tokens of prompts.")
@click.option("--tokens", default=192, show_default=True, help="Tokens written in decoding.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of each measurement.")
@click.option("--step-tokens", default=2048, show_default=True, help="New tokens of a step.")
@click.option("--kl-prompts", default=16, show_default=True, help="Prompts whose KL is taken.")
@click.option("--rung", "rungs", multiple=True, help="Measure only this rung; may be repeated.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write the picture to FILE.svg."
)
@out_file
@as_json
def ladder(
    model: str, random_weights: bool, device: str, rungs: tuple[str, ...], plot: Path | None,
    out: Path | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Show what each step from eager torch to the engine brings to MODEL.

    Each rung is the rung before with one step more: attention from the catalog, fused products,
    MXFP4 experts, CUDA graphs, and so on. For each rung: tokens a second, time to the first token,
    the device's memory, how far its next tokens are from those in bfloat16 (KL), and the effect of
    the step alone. A rung that cannot run here has the reason in its line, and so has one that
    fails; the others go on. A line on standard error tells of each rung as soon as it ends.

    \b
    Example:
      kernelcat moe ladder gpt-oss-20b --random-weights --plot ladder.svg
      kernelcat moe ladder small-gpt-oss --random-weights --batches 1,2 --context 100
    """
    with needs_extra("moe"):
        import torch

        from kernelcat.moe import ladder_report
        from kernelcat.moe.divergence import Prompts
        from kernelcat.moe.ladder import Plan, climb
        from kernelcat.moe.source import ModelSource
    batches = integers(options["batches"], "must be positive numbers like 1,8,64")
    if min(options["context"] - 1, options["tokens"] - 1, *_counts(options)) < 1:
        raise InvalidArgument(
            "--context and --tokens must be at least 2, --rounds, --step-tokens and --kl-prompts "
            "positive"
        )
    plan = Plan(
        tuple(sorted(set(batches))), options["context"], options["tokens"], options["rounds"],
        options["step_tokens"], Prompts(options["kl_prompts"]),
    )  # fmt: skip
    source = ModelSource.find(model, device, random_weights, tell=lambda line: echo(line, err=True))
    if source.device != "cuda":
        echo("no GPU is used: these are times of torch and of the catalog's oracles", err=True)
    name = torch.cuda.get_device_name() if source.device == "cuda" else "CPU"
    title = f"{source.name}{' (random weights)' * random_weights} on {name}, context {plan.context}"
    results: list[Result] = []

    def published() -> dict[str, Any]:
        about = {"model": source.name, "has_random_weights": random_weights, "device": name}
        return {**about, "plan": plan, "rungs": results}

    def keep(result: Result) -> None:
        _tell(result)
        results.append(result)
        if out is not None:
            save(out, published())

    results = climb(source, plan, rungs, keep)
    if out is not None:
        save(out, published())
    if plot is not None:
        try:
            plot.write_text(ladder_report.to_svg(results, title))
        except OSError as error:
            raise KernelcatError(f"{plot} cannot be written: {error.strerror}") from error
    if as_json:
        return emit(published())
    return show(ladder_report.sheet(results, title).console())


def _counts(options: dict[str, Any]) -> list[int]:
    return [options[name] for name in ("rounds", "step_tokens", "kl_prompts")]


def _tell(result: Result) -> None:
    """A line about a rung that has ended."""
    if result.reason:
        return echo(f"{result.name}: not run: {result.short_reason}", err=True)
    rates = ", ".join(f"{one.tokens_per_second:,.1f} at {one.batch}" for one in result.decoding)
    memory = f", {result.memory_bytes / 1e9:.1f} GB" if result.memory_bytes else ""
    echo(f"{result.name}: {rates} tokens/s, TTFT {result.ttft_ms:,.1f} ms{memory}", err=True)
