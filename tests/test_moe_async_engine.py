"""The engine's thread: streams, cancellation, faults and the end, on a CPU."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.async_engine import AsyncEngine, EngineError, RequestOutput
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings

LIMITS = Limits(step_tokens=64, max_running=8, max_waiting=1000, context=128)


@pytest.fixture(scope="module")
def model() -> moe.Decoder:
    return moe.random_model("small-llama", "cpu")


def greedy(max_tokens: int, **changed: Any) -> SamplingParameters:
    return SamplingParameters(**{"temperature": 0.0, "max_tokens": max_tokens, **changed})


def serve(
    model: moe.Decoder, work: Callable[[AsyncEngine], Awaitable[None]], **settings: Any
) -> Engine:
    """Runs ``work`` in an event loop, ends the engine, and proves that no page leaks."""
    defaults = {"limits": LIMITS, "page_size": 16, "num_pages": (41,)}
    engine = Engine(model, EngineSettings(**{**defaults, **settings}), lambda ids: "x" * len(ids))

    async def main() -> None:
        served = AsyncEngine(engine)
        await served.start()
        try:
            await asyncio.wait_for(work(served), 60)
        finally:
            await served.stop()
        assert not served.is_healthy

    asyncio.run(main())
    engine.check_integrity()
    assert engine.statistics().pages_in_use == 0
    return engine


async def collect(served: AsyncEngine, *args: Any, **named: Any) -> RequestOutput:
    """All output of a request as one."""
    whole = RequestOutput("")
    async for output in served.generate(*args, **named):
        whole.extend(output)
    return whole


def test_many_requests_at_once_write_what_they_write_alone(model: moe.Decoder) -> None:
    prompts = [[1 + i % 3, 5, 9] for i in range(40)]

    async def work(served: AsyncEngine) -> None:
        outputs = await asyncio.gather(*(collect(served, p, greedy(4)) for p in prompts))
        for i, output in enumerate(outputs):
            assert output.tokens == outputs[i % 3].tokens and output.text == "xxxx"
            assert output.finish_reason is FinishReason.LENGTH
        assert served.metrics()["output_tokens_total"] == 160
        with pytest.raises(InvalidArgument, match="no token"):
            await collect(served, [])
        assert served.is_healthy

    serve(model, work)


def test_a_reader_that_goes_away_cancels_its_request(model: moe.Decoder) -> None:
    async def work(served: AsyncEngine) -> None:
        outputs = served.generate([1, 2], greedy(100))
        await anext(outputs)
        await outputs.aclose()
        task = asyncio.create_task(collect(served, [1, 2, 3], greedy(100)))
        while not served.metrics()["requests_running"]:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert served.metrics()["requests_running"] == 0

    engine = serve(model, work)
    assert engine.statistics().output_tokens_total < 200


def test_outputs_that_wait_for_a_slow_reader_are_merged(model: moe.Decoder) -> None:
    async def work(served: AsyncEngine) -> None:
        sizes = []
        async for output in served.generate([1, 2], greedy(12, logprobs=1)):
            sizes.append(len(output.tokens))
            assert len(output.logprobs) == len(output.text) == sizes[-1]
            while served.metrics()["requests_running"]:
                await asyncio.sleep(0.01)
        assert sizes == [1, 11]

    serve(model, work)


def test_a_fault_in_a_step_is_answered_and_the_engine_goes_on(
    model: moe.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([True])

    def logits(x: torch.Tensor) -> torch.Tensor:
        if next(faults, False):
            raise RuntimeError("out of memory")
        return type(model).logits(model, x)

    monkeypatch.setattr(model, "logits", logits)

    async def work(served: AsyncEngine) -> None:
        output = await collect(served, [1, 2], greedy(3, repetition_penalty=2.0))
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "RuntimeError: out of memory"
        output = await collect(served, [1, 2], greedy(3, repetition_penalty=2.0))
        assert output.finish_reason is FinishReason.LENGTH

    serve(model, work)


def test_an_error_in_the_engine_itself_answers_everybody(
    model: moe.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))

    async def work(served: AsyncEngine) -> None:
        def update(*args: Any) -> None:
            raise KeyError("wrong")

        monkeypatch.setattr(served._engine._scheduler, "update", update)
        first, second = await asyncio.gather(
            collect(served, [1], greedy(3)), collect(served, [2], greedy(3))
        )
        for output in (first, second):
            assert output.finish_reason is FinishReason.ERROR and "KeyError" in output.error
        with pytest.raises(EngineError, match="KeyError"):
            await collect(served, [1], greedy(3))
        assert not served.is_healthy

    serve(model, work)
    assert isinstance(raised[0], KeyError)


@pytest.mark.parametrize(("grace", "reason"), [(30.0, "length"), (0.0, "cancelled")])
def test_stopping_waits_for_the_grace_time(grace: float, reason: str, model: moe.Decoder) -> None:
    async def work(served: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(served, [i], greedy(60))) for i in range(12)]
        while not served.metrics()["output_tokens_total"]:
            await asyncio.sleep(0.001)
        start = time.monotonic()
        stop = asyncio.create_task(served.stop(grace))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="does not run"):
            await collect(served, [1])
        outputs = await asyncio.gather(*tasks)
        await stop
        assert {str(output.finish_reason) for output in outputs} == {reason}
        assert all(output.error for output in outputs) == (reason == "cancelled")
        assert time.monotonic() - start < 30

    serve(model, work)
