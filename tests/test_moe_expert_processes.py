"""Experts divided among processes: server, command line, and what happens when a rank fails."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner
from moe_followers import ANSWER_S, command_of
from moe_schedules import engine, tokens, write
from moe_server import running_server, wait_until

from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.bench import prompts
from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.parallel.expert_engines import ExpertEngines
from kernelcat.moe.parallel.expert_stepping import SteppedRanks
from kernelcat.moe.profile import NUM_WARM, WINDOW
from kernelcat.moe.source import ModelSource
from kernelcat.moe.step_bytes import step_bytes

SOURCE = ModelSource("small-gpt-oss", "cpu", has_random_weights=True)
SETTINGS = EngineSettings(
    Limits(step_tokens=64, max_running=8, max_waiting=2, context=128), 16, cpu_cache_bytes=4 << 20
)
PROMPTS = [[5] * 20, [1, 2, 3], [200, 7, 9, 9]]


def greedy(max_tokens: int) -> SamplingParameters:
    return SamplingParameters(temperature=0, max_tokens=max_tokens)


async def written(served: ExpertEngines, prompt: list[int], max_tokens: int) -> list[int]:
    outputs = served.generate(prompt, greedy(max_tokens), needs_text=False)
    return [token async for output in outputs for token in output.tokens]


def test_a_server_of_two_ranks_writes_and_counts_what_one_would() -> None:
    """Tokens, metrics by expert, refusals, and a second load after both ranks have slept."""
    texts = tokens(write(engine(SOURCE.open()), PROMPTS, max_tokens=5))
    served = ExpertEngines(SOURCE, SETTINGS, 2, rebalance_every=3)
    with running_server(served, SOURCE.tokenizer()) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for _ in range(2):
            answers = [
                client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=5, temperature=0, logprobs=0
                )
                for prompt in PROMPTS
            ]
            decode = SOURCE.tokenizer().decode
            assert [answer.choices[0].text for answer in answers] == [
                decode(text[len(prompt) :]) for text, prompt in zip(texts, PROMPTS, strict=True)
            ]
        with pytest.raises(openai.BadRequestError, match="has room for 128"):
            client.completions.create(model="tiny", prompt=[1] * 128, max_tokens=5)
        content = client._client.get(f"{url}/metrics").text
    values = dict(
        line.rsplit(maxsplit=1) for line in content.splitlines() if not line.startswith("#")
    )
    counts = [float(value) for name, value in values.items() if "expert_assignments_total{" in name]
    num_tokens = 2 * sum(len(text) - 1 for text in texts)
    cached = float(values["kernelcat_cached_tokens_total"])
    assert len(counts) == 2 * 8 and sum(counts) == 2 * 4 * (num_tokens - cached)
    assert float(values['kernelcat_rank_assignments_total{layer="1",rank="1"}']) > 0


FAULTS = {"dies": (1, signal.SIGKILL), "hangs": (0, signal.SIGSTOP)}
"""The rank that fails, and how; rank 0 is the one that the others ask."""


@pytest.mark.parametrize("fault", FAULTS)
def test_all_requests_are_answered_when_a_rank(fault: str) -> None:
    """The other ranks' requests, and those of the rank itself; then the server ends."""
    served, (rank, number) = ExpertEngines(SOURCE, SETTINGS, 2), FAULTS[fault]

    async def use() -> float:
        await served.start()
        first = [asyncio.create_task(written(served, prompt, 2)) for prompt in PROMPTS]
        assert all(len(text) == 2 for text in await asyncio.gather(*first))
        tasks = [asyncio.create_task(written(served, prompt, 100)) for prompt in PROMPTS]
        await asyncio.sleep(0.3)
        os.kill(command_of(served.process_ids[rank]), number)
        start = time.monotonic()
        answers = await asyncio.wait_for(
            asyncio.gather(*tasks, return_exceptions=True), ANSWER_S + 5
        )
        taken = time.monotonic() - start
        assert all(isinstance(answer, EngineError) or len(answer) < 100 for answer in answers)
        wait_until(lambda: not served.is_healthy)
        with pytest.raises(EngineError, match=f"rank {rank}"):
            await written(served, PROMPTS[0], 2)
        await served.stop()
        return taken

    assert asyncio.run(use()) < ANSWER_S


def test_what_no_rank_can_open_is_said_by_all() -> None:
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM has no experts"):
        ExpertEngines(ModelSource("small-llama", "cpu", has_random_weights=True), SETTINGS, 2)


# ---- recorded steps ------------------------------------------------------------------------------


def divided_floor(own: int, batch: int, context: int) -> float:
    """Bytes that one of two ranks must read, of ``batch`` requests of which it has ``own``."""
    model = SOURCE.open()
    layers = [layer.experts for layer in model.layers]
    experts = sum(each.numel() * each.element_size() for one in layers for each in one.values())

    def part(count: int) -> float:  # 4 of 8 experts serve a token
        return 1 - (1 - 4 / 8) ** count

    counts = len(layers) * 8 * (8 // 2 + 1)  # of what experts have served
    whole = step_bytes(model, own, context, torch.float32)
    return whole - experts * part(own) + experts / 2 * part(batch) + counts


def test_rank_0_records_decode_steps_of_all_ranks(tmp_path: Path) -> None:
    """The first step and the last one decode the whole batch; all of it is over afterwards."""
    ranks, trace = SteppedRanks(SOURCE, SETTINGS, 2), tmp_path / "trace.json.gz"
    for batch, own in ((3, 2), (1, 1)):  # then rank 1 has no request
        before = ranks.statistics()
        found = ranks.profile_decoding(prompts(batch, 30, 256, seed=batch), trace, num_steps=4)
        after = ranks.statistics()
        assert (found.batch, found.ranks, found.steps, found.kernels) == (batch, 2, 4, ())
        assert found.floor_bytes == pytest.approx(divided_floor(own, batch, found.context), abs=1)
        assert f"batch {batch}, context {found.context}; rank 0 of 2" in found.sheet().title
        assert after.requests_running == after.requests_waiting == 0
        assert after.requests_total - before.requests_total == batch
        recorded = batch * (NUM_WARM + 4)
        assert recorded < after.output_tokens_total - before.output_tokens_total <= 2 * recorded
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        (window,) = (e for e in events if e["name"] == WINDOW)
        layers = [e for e in events if e["name"] == "layer 1"]
        begin, end = window["ts"], window["ts"] + window["dur"]
        assert [begin <= e["ts"] <= end for e in layers] == [False] * NUM_WARM + [True] * 4
    request = ranks.submit(PROMPTS[0], greedy(3), needs_text=False)
    while ranks.has_work:
        ranks.step()
    assert request.num_written == 3
    with pytest.raises(KernelcatError, match="cannot be written"):
        ranks.profile_decoding(prompts(2, 30, 256, 0), tmp_path / "no" / "trace.json")
    ranks.close()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_context_that_is_too_short_to_profile_ends_all_ranks(batch: int, tmp_path: Path) -> None:
    """Also the rank that has no request and waits for the other one."""
    limits = Limits(step_tokens=64, max_running=8, context=36)
    ranks = SteppedRanks(SOURCE, EngineSettings(limits, 16), 2)
    with pytest.raises(EngineError, match="the context of 36 tokens is too short to profile"):
        ranks.profile_decoding(prompts(batch, 30, 256, 0), tmp_path / "trace.json", 4)
    ranks.close()


MODEL = ("small-gpt-oss", "--random-weights", "--device", "cpu")


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(main, ["moe", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_verbs_divide_experts(tmp_path: Path) -> None:
    trace = ("--profile", str(tmp_path / "step.json"))
    alone, divided = (
        run("generate", MODEL[0], "Hello", *MODEL[1:], "--max-tokens", "5", "--json", *more)
        for more in ((), ("--ep", "2", *trace))
    )
    assert divided["text"] == alone["text"] and divided["output_tokens"] == 5
    assert [divided["profile"][name] for name in ("batch", "ranks", "steps")] == [1, 2, 1]
    found = run(
        "bench", *MODEL, "--batches", "2", "--context", "8", "--tokens", "25", "--rounds", "1",
        "--requests", "0", "--ep", "2", "--rebalance-every", "2", *trace, "--json",
    )  # fmt: skip
    assert found["ep"] == 2 and found["decoding"][0]["batch"] == 2
    assert [(one["batch"], one["ranks"]) for one in found["profiles"]] == [(2, 2)]
    statistics = found["statistics"]
    assert [len(row) for row in statistics["expert_assignments_total"]] == [8, 8]
    assert [len(row) for row in statistics["rank_assignments_total"]] == [2, 2]
    assert statistics["moved_experts_total"] > 0


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("bench", ["--ep", "1", "--rebalance-every", "9"], "add --ep"),
        ("serve", ["--ep", "0"], "--ep 0 must be"),
        ("serve", ["--tp", "2"], "--tp and --ep cannot be combined"),
        ("bench", ["--disaggregate"], "--ep and --disaggregate cannot be combined"),
        ("serve", ["--host-cache", "1"], "are for an engine alone"),
        ("bench", ["--prefill", "8"], "are for one process"),
        ("generate", ["--nvtx"], "are for one process"),
        ("serve", ["--rebalance-every", "-1"], "steps are not negative"),
    ],
)
def test_what_does_not_go_together_is_one_line(verb: str, options: list[str], message: str) -> None:
    arguments = ["Hello"] if verb == "generate" else []
    command = ["moe", verb, MODEL[0], *arguments, *MODEL[1:], "--ep", "2", *options]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1 and message in done.output and "Traceback" not in done.output
