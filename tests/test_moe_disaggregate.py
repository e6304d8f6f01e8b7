"""Two engine processes behind one front: the tokens of one engine, faults, and what a router does.

The processes are real, and exchange pages through shared memory; models are small, on the CPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_moe_engine_process import answer, until

from kernelcat.errors import InvalidArgument
from kernelcat.moe.disaggregate.front import Disaggregated
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.engine import Engine, EngineError
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.source import ModelSource

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


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i * i) % 250 for i in range(length)]


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


def child_of(guard: int) -> int:
    """The process that a guard has started."""
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


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
        os.kill(child_of(process.process_id), number)
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
