"""The engine in a process of its own: as `AsyncEngine`, and what happens when the process dies."""

from __future__ import annotations

import asyncio
import os
import signal

import openai
import pytest
from click.testing import CliRunner
from moe_answers import answer, until
from moe_server import running_server, tiny_engine, wait_until

from kernelcat import moe
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.async_engine import AsyncEngine
from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.serve.engine_process import EngineProcess
from kernelcat.moe.source import ModelSource

SOURCE = ModelSource("small-llama", "cpu", has_random_weights=True)
LIMITS = {"step_tokens": 64, "max_running": 2, "max_waiting": 2, "context": 256}
GREEDY = SamplingParameters(temperature=0, max_tokens=12, logprobs=2)
LONG = SamplingParameters(max_tokens=250)


def opened() -> EngineProcess:
    return EngineProcess(SOURCE, EngineSettings(Limits(**LIMITS), cpu_cache_bytes=4 << 20))


def test_a_process_is_an_engine_and_its_end_is_seen():
    process = opened()
    tokenizer = SOURCE.tokenizer()
    twin = AsyncEngine(tiny_engine(tokenizer.decode, moe.random_model("small-llama", "cpu")))

    async def use() -> None:
        for engine in (process, twin):
            await engine.start()
        theirs, mine = [await answer(engine, [1, 2, 3], GREEDY) for engine in (process, twin)]
        assert (theirs.tokens, theirs.text) == (mine.tokens, mine.text) and len(mine.tokens) == 12
        assert theirs.logprobs == mine.logprobs and theirs.finish_reason is FinishReason.LENGTH

        with pytest.raises(InvalidArgument, match="has room for 256"):
            await answer(process, [1] * 256, GREEDY)
        streams = [process.generate([i], LONG) for i in range(4)]
        firsts = [asyncio.create_task(anext(stream)) for stream in streams[:2]]
        await asyncio.gather(*firsts)
        firsts += [asyncio.create_task(anext(stream)) for stream in streams[2:]]
        await until(process, requests_running=2, requests_waiting=2)
        with pytest.raises(QueueFull, match="2 requests wait"):
            await answer(process, [1], GREEDY)
        for stream, first in zip(streams, firsts, strict=True):
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
        await until(process, requests_running=0, requests_waiting=0, pages_in_use=0)

        running = asyncio.create_task(answer(process, [1], LONG))
        await until(process, requests_running=1)
        await process.stop()
        assert (await running).finish_reason is FinishReason.CANCELLED
        assert not process.is_healthy
        for use in (
            lambda: answer(process, [1], GREEDY),
            lambda: asyncio.to_thread(process.metrics),
        ):
            with pytest.raises(EngineError):
                await use()
        await twin.stop()

    asyncio.run(use())


def test_what_cannot_be_opened_is_said(tmp_path):
    with pytest.raises(InvalidArgument, match=r"config\.json does not exist"):
        EngineProcess(ModelSource(str(tmp_path), "cpu"), EngineSettings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafts", "-1"], "num_drafts=-1"),
        (["--memory", "1.5"], "memory=1.5 must be"),
        (["--cpu-cache", "1000"], "one request of context=64 tokens needs"),
    ],
)
def test_the_verb_serve_says_in_a_line_why_it_does_not_start(options, message):
    command = ["moe", "serve", "small-llama", "--random-weights", "--device", "cpu"]
    done = CliRunner().invoke(main, [*command, "--context", "64", *options])
    assert done.exit_code == 1 and message in done.output and "Traceback" not in done.output


def test_a_process_that_dies_ends_the_server():
    process = opened()
    with running_server(process, SOURCE.tokenizer()) as (url, server):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=250, stream=True)
        next(iter(stream))
        os.kill(process.process_id, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(stream)
        wait_until(lambda: server.has_failed)
