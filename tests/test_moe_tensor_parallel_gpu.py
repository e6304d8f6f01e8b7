"""Engines on several ranks of GPUs: CUDA graphs whose exchanges are kernels of the catalog."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from moe_followers import ANSWER_S, LIMITS, followers_below
from moe_models import DECODE_16, prefilled

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.source import ModelSource
from kernelcat.runtime import driver

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24


@pytest.fixture(params=["shared", "two"])
def gpus(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The GPUs of two ranks: one that they share, and two."""
    if request.param == "shared":
        return 0, 0
    if driver.count() < 2:
        pytest.skip("needs two GPUs")
    return 0, 1


def engine_of(model: moe.Decoder) -> Engine:
    num_pages = (80,) * len(moe.windows(model.cache_layers))
    return Engine(model, EngineSettings(LIMITS, 16, num_pages))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in (70, 33, 9)]


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "deepseek-v3", "llama"])
def test_ranks_in_graphs_write_what_one_gpu_finds_best(name: str, gpus: tuple[int, int]) -> None:
    """Sums are rounded in another order, so a token may be one whose logit nearly ties the best."""
    one = moe.random_model(f"small-{name}", "cuda:0")
    model = ModelSource(f"small-{name}", "cuda", True, tp=2, gpus=gpus).open()
    assert model.exchange is not None
    try:
        engine = engine_of(model)
        assert engine._runner.graphs
        greedy = SamplingParameters(temperature=0, max_tokens=NUM_TOKENS)
        drawn = SamplingParameters(temperature=1, seed=7, max_tokens=NUM_TOKENS)
        requests = [engine.submit(prompt, greedy) for prompt in prompts()]
        requests.append(engine.submit(prompts()[2], drawn))
        while engine.has_work:
            for output in engine.step():
                assert not output.error, output.error
        engine.check_integrity()
        engine.close()
    finally:
        model.exchange.close()
    is_near = []
    for request in requests[:3]:
        (logits,) = prefilled(one, [request.tokens])
        first = len(request.prompt) - 1
        rows, chosen = logits[first:-1], torch.tensor(request.tokens[first + 1 :], device="cuda:0")
        own = rows.gather(1, chosen[:, None].long())[:, 0]
        is_near.append(rows.amax(1) - own <= DECODE_16 * rows.abs().amax())
    assert all(len(each) == NUM_TOKENS for each in is_near)
    assert torch.cat(is_near).float().mean() >= 0.95


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_fails_ends_all_requests(number: signal.Signals, gpus: tuple[int, int]) -> None:
    model = ModelSource("small-llama", "cuda", True, tp=2, gpus=gpus).open()
    assert model.exchange is not None
    try:
        engine = engine_of(model)
        for i in range(6):
            engine.submit([1, 2, i], SamplingParameters(max_tokens=200))
        for _ in range(4):
            assert not any(output.error for output in engine.step())
        [follower] = followers_below(os.getpid())
        os.kill(follower, number)
        start, outputs = time.monotonic(), []
        while engine.has_work:
            outputs += engine.step()
        assert time.monotonic() - start < ANSWER_S
        failed = [output for output in outputs if output.error]
        assert len(failed) == 6 and not engine.is_healthy
        assert all(output.finish_reason is FinishReason.ERROR for output in failed)
        assert all("rank 1" in output.error for output in failed)
        engine.close()
    finally:
        model.exchange.close()


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=f"{driver.count()} are visible"):
        ModelSource.find("small-llama", "cuda", True, tp=1 + driver.count())
