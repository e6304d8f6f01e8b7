"""The verb generate of moe."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelcat.cli.options import as_json, divides_experts, ep, nvtx, profile_file, tp
from kernelcat.cli.output import echo, emit, show, stream
from kernelcat.errors import InvalidArgument, needs_extra

if TYPE_CHECKING:
    from kernelcat.moe.engine.engine import Engine
    from kernelcat.moe.engine.parameters import SamplingParameters
    from kernelcat.moe.parallel.expert_stepping import SteppedRanks
    from kernelcat.moe.source import ModelSource
    from kernelcat.moe.tokenizer import Tokenizer

SLOW = (
    "no GPU is used: the model runs on the catalog's oracles, which are NumPy code made to be "
    "right, not fast"
)


@dataclass
class Generated:
    """What `generate` prints with ``--json``; times in seconds."""

    model: str
    device: str
    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    load_seconds: float
    ttft_seconds: float
    tokens_per_second: float | None
    profile: dict[str, Any] | None = None


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--random-weights", is_flag=True, help="MODEL is a name; its weights are random.")
@click.option("--device", default="", help="cuda or cpu; default: cuda where there is a GPU.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens to write, at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0: the likeliest tokens.")
@click.option("--top-p", default=1.0, show_default=True, help="Part of the probability to draw of.")
@click.option("--top-k", default=0, show_default=True, help="Tokens to draw of; 0 for all.")
@click.option("--seed", type=int, help="Seed of the draws.")
@click.option("--stop", multiple=True, help="String that ends the text; may be repeated.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
@click.option(
    "--upcycle",
    type=click.Choice(["", "copies", "columns"]),
    default="",
    help="Run a dense Llama as a mixture of 4 experts, which writes the same text.",
)
@tp
@ep
@click.option("--memory", default=0.9, show_default=True, help="Part of the GPU's memory to take.")
@profile_file
@nvtx
@as_json
def generate(
    model: str, prompt: str, random_weights: bool, device: str, raw: bool, upcycle: str,
    tp: int, ep: int, memory: float, profile: Path | None, nvtx: bool, as_json: bool,
    **sampling: Any,
) -> None:  # fmt: skip
    """Write the answer of MODEL to PROMPT.

    MODEL is a folder with a checkpoint, or smollm2, which is downloaded on the first use. With
    --random-weights MODEL is the name of a configuration; the text then means nothing.

    \b
    Example:
      kernelcat moe generate smollm2 "Why is the sky blue?"
      kernelcat moe generate gpt-oss-20b "Hello" --random-weights --max-tokens 20
      kernelcat moe generate gpt-oss-20b "Hello" --random-weights --profile step.json
    """
    with needs_extra("moe"):
        from kernelcat.moe import ranges
        from kernelcat.moe.engine.parameters import SamplingParameters
        from kernelcat.moe.parallel.expert_stepping import profile_steps
        from kernelcat.moe.profile import NUM_STEPS, NUM_WARM
        from kernelcat.moe.source import ModelSource
    most = sampling["max_tokens"] - NUM_WARM - 2  # two tokens are written before and after
    if profile and most < 1:
        raise InvalidArgument(f"--profile needs --max-tokens of at least {NUM_WARM + 3}")
    if divides_experts(ep) and (nvtx or upcycle):
        raise InvalidArgument("--nvtx and --upcycle are for one process, not for --ep")
    start = time.monotonic()
    source = ModelSource.find(
        model, device, random_weights, upcycle, lambda text: echo(text, err=True), tp
    )
    if source.device == "cpu":
        echo(SLOW, err=True)
    tokenizer = source.tokenizer()
    tokens = tokenizer.encode(prompt) if raw else chat_tokens(tokenizer, prompt)
    parameters = SamplingParameters(**sampling, stop_tokens=tokenizer.stop_tokens)
    length = len(tokens) + (parameters.max_tokens or 1)
    engine = _engine(source, tokenizer, length, memory, ep)
    loaded = time.monotonic() - start
    with ranges.for_nvtx() if nvtx else nullcontext():
        result = _run(engine, tokens, parameters, silent=as_json)
    recorded = None
    if profile:
        recorded = profile_steps(engine, [tokens], profile, min(NUM_STEPS, most))
    engine.close()
    generated = Generated(
        source.name, source.device, prompt_tokens=len(tokens), load_seconds=loaded, **result,
        profile=recorded.published() if recorded else None,
    )  # fmt: skip
    if as_json:
        return emit(asdict(generated))
    speed = generated.tokens_per_second
    rate = f", {speed:.1f} tokens/s after it" if speed else ""
    echo(
        f"\n{generated.output_tokens} tokens ({generated.finish_reason}); first token after "
        f"{generated.ttft_seconds:.2f} s{rate}; loading took {loaded:.1f} s",
        err=True,
    )
    if recorded:
        show(recorded.sheet().console())
    return None


def chat_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """``prompt`` as the user's message in the model's chat template, if the model has one."""
    import json

    from kernelcat.moe.serve.chat_format import chat_format
    from kernelcat.moe.serve.requests import ChatRequest

    form = chat_format(tokenizer)
    if form is None:
        return tokenizer.encode(prompt)
    body = {"model": "", "messages": [{"role": "user", "content": prompt}]}
    return list(form.prompt(ChatRequest.parse(json.dumps(body).encode())).tokens)


def _engine(
    source: ModelSource, tokenizer: Tokenizer, length: int, memory: float, ep: int
) -> Engine | SteppedRanks:
    """An engine for one request of ``length`` tokens."""
    from kernelcat import moe
    from kernelcat.moe.engine.engine import Engine
    from kernelcat.moe.engine.limits import Limits
    from kernelcat.moe.engine.settings import EngineSettings
    from kernelcat.moe.parallel.expert_stepping import SteppedRanks

    outline = source.outline()
    if length > outline.max_positions:
        raise InvalidArgument(
            f"prompt and --max-tokens are {length} tokens, and the model has "
            f"{outline.max_positions} positions: lower --max-tokens"
        )
    limits = Limits(max_running=1, max_waiting=1, context=max(2, length))
    pages = -(-length // EngineSettings.page_size) + 1
    settings = EngineSettings(
        limits,
        memory=memory,
        num_pages=(pages,) * len(moe.windows(outline.cache_layers)),
    )
    if ep > 1:
        return SteppedRanks(source, settings, ep)
    return Engine(source.open(), settings, tokenizer.decode)


def _run(
    engine: Engine | SteppedRanks, tokens: list[int], parameters: SamplingParameters, silent: bool
) -> dict[str, Any]:
    """Runs one request and prints its text as it comes."""
    from kernelcat.moe.engine.engine import EngineError

    start = time.monotonic()
    request = engine.submit(tokens, parameters)
    text, first, last = "", 0.0, start
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise EngineError(output.error)
            last = time.monotonic()
            first = first or last
            text += output.text
            if not silent:
                stream(output.text)
    count = request.num_written
    return {
        "text": text,
        "output_tokens": count,
        "finish_reason": str(request.finish_reason),
        "ttft_seconds": first - start,
        "tokens_per_second": (count - 1) / (last - first) if count > 1 else None,
    }
