"""Experts divided among processes: server, command line, and what happens when a rank fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import openai
import pytest
from click.testing import CliRunner
from moe_followers import ANSWER_S, command_of
from moe_schedules import engine, tokens, write
from moe_server import running_server, wait_until

from kernelcat.cli import main
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.parallel.expert_engines import ExpertEngines
from kernelcat.moe.source import ModelSource

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


MODEL = ("small-gpt-oss", "--random-weights", "--device", "cpu")


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(main, ["moe", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_verbs_divide_experts() -> None:
    alone, divided = (
        run("generate", MODEL[0], "Hello", *MODEL[1:], "--max-tokens", "5", "--json", *more)
        for more in ((), ("--ep", "2"))
    )
    assert divided["text"] == alone["text"] and divided["output_tokens"] == 5
    found = run(
        "bench", *MODEL, "--batches", "2", "--context", "8", "--tokens", "3", "--rounds", "1",
        "--requests", "0", "--ep", "2", "--rebalance-every", "2", "--json",
    )  # fmt: skip
    assert found["ep"] == 2 and found["decoding"][0]["batch"] == 2
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
