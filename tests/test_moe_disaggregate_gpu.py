"""Two engines on two GPUs: the pages that come are those that one engine would have written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from moe_answers import answer, prompt, until

from kernelcat.moe.disaggregate.front import Disaggregated
from kernelcat.moe.disaggregate.router import Router
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.serve.engine_process import EngineProcess
from kernelcat.moe.source import ModelSource
from kernelcat.runtime import driver

pytestmark = pytest.mark.gpu
GREEDY = SamplingParameters(temperature=0, max_tokens=12)
LENGTHS = (5, 70, 64, 150, 400, 150)
"""Tokens of the prompts; steps have at most 128."""


async def written(engine: EngineProcess | Disaggregated) -> list[list[int]]:
    """The tokens of one request after the other: kernels and their results are then the same."""
    await engine.start()
    found = [(await answer(engine, prompt(n, i), GREEDY)).tokens for i, n in enumerate(LENGTHS)]
    together = await asyncio.gather(*(answer(engine, prompt(300, i), GREEDY) for i in range(12)))
    assert all(len(each.tokens) == 12 and not each.error for each in together)
    await until(engine, requests_running=0, pages_in_use=0)
    if isinstance(engine, Disaggregated):
        await until(engine, prefill_requests_running=0, prefill_pages_in_use=0)
        numbers = await asyncio.to_thread(engine.metrics)
        assert numbers["fetched_requests_total"] == len(LENGTHS) + 12
    await engine.stop()
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("small-gpt-oss", {}),
        ("small-gpt-oss", {"cache_dtype": "float8_e4m3fn"}),
        ("small-deepseek-v3", {}),
    ],
)
def test_two_gpus_write_the_tokens_of_one(name: str, options: dict[str, Any]) -> None:
    if driver.count() < 2:
        pytest.skip("needs two GPUs")
    model = ModelSource(name, "cuda", has_random_weights=True)
    limits = Limits(step_tokens=128, max_running=16, max_waiting=64, context=512)
    groups = 2 if "gpt-oss" in name else 1
    settings = EngineSettings(limits, page_size=64, num_pages=(300,) * groups, **options)
    expected = asyncio.run(written(EngineProcess(model, settings)))
    assert asyncio.run(written(Disaggregated(model, settings, Router(short=0)))) == expected
