"""Two engine processes behind one front: the tokens of one engine, faults, and what a router does.

The processes are real, and exchange pages through shared memory; models are small, on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner
from moe_answers import answer, prompt, until
from moe_followers import command_of
from moe_server import running_server, wait_until

from kernelcat import catalog
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument
from kernelcat.moe.disaggregate.device_link import CONFIG, COUNTS, padded
from kernelcat.moe.disaggregate.front import Disaggregated
from kernelcat.moe.disaggregate.interference import Traffic, measure
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.engine import Engine, EngineError
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.pages_out import PageMoves
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.source import ModelSource
from kernelcat.reference.kv_transfer import transferred
from kernelcat.report.engine_sheets import interference_sheet
from kernelcat.runtime import gpu
from kernelcat.store.model_results import ModelResult

GREEDY = SamplingParameters(temperature=0, max_tokens=12, logprobs=2)
DRAWN = SamplingParameters(temperature=0.8, top_k=20, max_tokens=12, seed=5, repetition_penalty=1.2)
LENGTHS = (5, 70, 150, 64, 33, 200)
"""Tokens of the prompts: one page and many, whole pages, several steps."""
ANSWER_S = 10.0
"""Seconds in which requests are answered after a side has died, or hangs."""


def source(name: str = "small-gpt-oss") -> ModelSource:
    return ModelSource(name, "cpu", has_random_weights=True)


def settings(**options: Any) -> EngineSettings:
    limits = Limits(step_tokens=64, max_running=4, max_waiting=16, context=256)
    return EngineSettings(limits, page_size=16, cpu_cache_bytes=4 << 20, **options)


@asynccontextmanager
async def started(front: Disaggregated) -> AsyncIterator[Disaggregated]:
    await front.start()
    try:
        yield front
        for name in ("", "prefill_"):
            await until(front, **{f"{name}requests_running": 0, f"{name}pages_in_use": 0})
    finally:
        await front.stop()


def use(front: Disaggregated, work: Callable[[Disaggregated], Awaitable[None]]) -> None:
    """Runs ``work``, after which no page may be in use on either side."""

    async def run() -> None:
        async with started(front):
            await work(front)

    asyncio.run(run())


def alone(model: ModelSource, requests: list[tuple[list[int], SamplingParameters]]) -> list[Any]:
    """What one engine in this process writes."""
    engine = Engine(model.open(), settings(), model.tokenizer().decode)
    for number, (tokens, parameters) in enumerate(requests):
        engine.submit(tokens, parameters, request_id=str(number))
    found: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step():
            if output.request_id in found:
                found[output.request_id].extend(output)
            else:
                found[output.request_id] = output
    return [found[str(number)] for number in range(len(requests))]


@pytest.mark.parametrize(
    ("name", "options"),
    [("small-gpt-oss", {}), ("small-deepseek-v3", {"speculation": Speculation(3)})],
)
def test_two_engines_write_the_tokens_of_one(name: str, options: dict[str, Any]) -> None:
    model = source(name)
    requests = [(prompt(n, i), DRAWN if i == 2 else GREEDY) for i, n in enumerate(LENGTHS)]
    expected = alone(model, requests)

    async def work(front: Disaggregated) -> None:
        found = await asyncio.gather(*(answer(front, *request) for request in requests))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine.tokens, mine.text) == (theirs.tokens, theirs.text)
            assert mine.finish_reason is theirs.finish_reason
            for one, other in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        numbers = await asyncio.to_thread(front.metrics)
        assert numbers["fetched_requests_total"] == len(LENGTHS)
        assert numbers["output_tokens_total"] == sum(len(each.tokens) for each in found)
        assert numbers["prompt_tokens_total"] == sum(LENGTHS)

    use(Disaggregated(model, settings(**options), Router(short=0)), work)


def test_prompts_go_where_little_is_left_to_compute() -> None:
    async def work(front: Disaggregated) -> None:
        async def fetched() -> float:
            return (await asyncio.to_thread(front.metrics))["fetched_requests_total"]

        short = await answer(front, prompt(20), GREEDY)
        assert await fetched() == 0
        first = await answer(front, prompt(150), GREEDY)
        assert await fetched() == 1
        again = await answer(front, prompt(150), GREEDY)  # the decode engine has its pages
        assert await fetched() == 1
        assert (again.tokens, again.num_cached) == (first.tokens, 144)
        longer = await answer(front, prompt(150) + prompt(60, 7), GREEDY)
        assert await fetched() == 2
        assert longer.num_cached == 144  # on both sides: 66 tokens are computed, 5 pages move
        last = await answer(front, prompt(20), GREEDY)
        assert last.tokens == short.tokens
        numbers = await asyncio.to_thread(front.metrics)
        assert numbers["prefill_cached_tokens_total"] == 144
        [expected] = alone(source(), [(prompt(150) + prompt(60, 7), GREEDY)])
        assert longer.tokens == expected.tokens

    use(Disaggregated(source(), settings(), Router(short=40)), work)


def test_a_request_that_is_cancelled_leaves_no_page_on_either_side() -> None:
    async def work(front: Disaggregated) -> None:
        for turn, delay in enumerate((0.0, 0.01, 0.05)):  # while it waits, moves, and writes
            streams = [front.generate(prompt(200, i), GREEDY) for i in range(3)]
            firsts = [asyncio.create_task(anext(stream)) for stream in streams]
            await until(front, requests_total=3 * (turn + 1))
            await asyncio.sleep(delay)
            for first, stream in zip(firsts, streams, strict=True):
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await stream.aclose()
            await until(front, pages_in_use=0, prefill_pages_in_use=0, requests_waiting=0)
        again = await answer(front, prompt(64), GREEDY)
        assert len(again.tokens) == 12

    use(Disaggregated(source(), settings(), Router(short=0)), work)


def test_requests_that_lose_their_pages_are_computed_where_they_write() -> None:
    model, parameters = source(), SamplingParameters(temperature=0, max_tokens=60)
    requests = [(prompt(60, i), parameters) for i in range(4)]
    expected = alone(model, requests)

    async def work(front: Disaggregated) -> None:
        found = await asyncio.gather(*(answer(front, *request) for request in requests))
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        assert (await asyncio.to_thread(front.metrics))["preemptions_total"] > 0

    use(Disaggregated(model, settings(num_pages=(30, 22)), Router(short=0)), work)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_requests_of_a_side_that_fails_are_answered(side: str, fault: str) -> None:
    front = Disaggregated(source(), settings(), Router(short=0))

    async def run() -> None:
        await front.start()
        stream = front.generate(prompt(60), SamplingParameters(max_tokens=190))
        await anext(stream)
        process = getattr(front, side)
        number = signal.SIGKILL if fault == "dies" else signal.SIGSTOP
        os.kill(command_of(process.process_id), number)
        begin = time.monotonic()
        with pytest.raises(EngineError) if side == "decode" else nullcontext() as error:
            output = await answer(front, prompt(200, 3), GREEDY)
        if error is None:
            assert output.finish_reason is FinishReason.ERROR
            assert output.error.startswith("prefill engine: ")
        assert time.monotonic() - begin < ANSWER_S
        assert not front.is_healthy
        with pytest.raises(EngineError):
            await answer(front, prompt(3), GREEDY)
        await front.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"cpu_cache_bytes": 1000}, "one request of context=256 tokens needs")],
)
def test_what_cannot_be_opened_is_said(options: dict[str, Any], message: str) -> None:
    limits = Limits(step_tokens=64, max_running=4, max_waiting=16, context=256)
    with pytest.raises(InvalidArgument, match=message):
        Disaggregated(source(), EngineSettings(limits, page_size=16, **options))


def test_a_server_of_two_engines_ends_when_one_has_died() -> None:
    front = Disaggregated(source(), settings(), Router(short=0))
    with running_server(front, source().tokenizer()) as (url, server):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done = client.completions.create(model="tiny", prompt="a" * 50, max_tokens=5)
        assert done.usage is not None and done.usage.completion_tokens == 5
        text = client._client.get(f"{url}/metrics").text
        assert "kernelcat_fetched_requests_total 1.0" in text
        assert "kernelcat_prefill_steps_total" in text
        os.kill(command_of(front.prefill.process_id), signal.SIGKILL)
        wait_until(lambda: server.has_failed)


def test_interference_is_measured_while_prompts_arrive() -> None:
    traffic = Traffic(batch=2, context=20, num_tokens=40, prompt_tokens=100, rate=20.0)
    front = Disaggregated(source(), settings(), Router(short=0))
    found = asyncio.run(measure("disaggregated", front, traffic))
    assert found.idle_ms.count > 20 and found.loaded_ms.count > 20
    assert found.prompt_ms is not None and found.prompt_ms.count > 0
    assert found.ratio == found.loaded_ms.p99 / found.idle_ms.p99


def test_what_the_verb_bench_writes_is_a_result_of_models(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    command = [
        "moe", "bench", "small-gpt-oss", "--random-weights", "--device", "cpu", "--disaggregate",
        "--batches", "2", "--context", "9", "--tokens", "40", "--prefill", "9", "--rate", "9",
        "--step-tokens", "64", "--out", str(out), "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    kept = ModelResult.of("h200x2-nvlink", "c", "2026-11-26", content)
    assert kept.measured == {key: value for key, value in content.items() if key != "model"}
    lines = interference_sheet("", kept.measured["interference"]).lines
    assert [line[:2] for line in lines] == [("colocated", "2"), ("disaggregated", "2")]
    with pytest.raises(InvalidArgument, match="batch 2 has no times of disaggregated"):
        first = {**content, "interference": content["interference"][:1]}
        ModelResult.of("h200x2-nvlink", "c", "2026-11-26", first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["small-gpt-oss", "--random-weights", "--rate", "2"], "needs --prefill"),
        (["small-gpt-oss", "--random-weights", "--prefill", "9"], "and one --rate"),
        (["--url", "http://127.0.0.1:1"], "--disaggregate is for a MODEL"),
        (["small-gpt-oss", "--prefill", "9", "--rate", "inf"], "must be a number of prompts"),
    ],
)
def test_the_verb_bench_says_what_it_needs(options: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["moe", "bench", "--disaggregate", "--device", "cpu", *options])
    assert done.exit_code == 1 and message in done.output


def test_a_router_keeps_what_is_short_or_would_wait() -> None:
    router = Router(short=64)
    assert router.is_local(64, 0, 3) and not router.is_local(65, 0, 3)
    assert router.is_local(500, 501, 0)  # nobody writes, and the other engine has more to do
    assert not router.is_local(500, 500, 0) and not router.is_local(500, 501, 1)


def test_lists_of_pages_are_padded_and_cut() -> None:
    count = COUNTS[-1] + 3
    parts = list(padded(PageMoves([*range(count)], [*range(count, 2 * count)]), 1))
    assert [[len(column) for column in part] for part in parts] == [[1024] * 3, [16] * 3]
    assert parts[1][0] == [1024, 1025, 1026, *[-1] * 13]
    assert parts[1][1] == [1, 1, 1, *[-1] * 13]
    assert parts[1][2][:3] == [2 * count - 3, 2 * count - 2, 2 * count - 1]
    assert not list(padded(PageMoves([], []), 1))


def test_the_launches_of_a_link_are_legal() -> None:
    kernel = catalog.implementation("kv_transfer", "cuda", "vectors")
    for row, caches in ((512, 2), (576, 1)):
        problem = transferred(COUNTS[-1], row, caches, pages=50000)
        assert kernel.why_not(CONFIG, problem, gpu.find("h200")) is None
