"""Experts divided among GPUs: CUDA graphs whose exchanges are kernels of the catalog."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from moe_followers import ANSWER_S, command_of
from moe_models import DECODE_16, prefilled

from kernelcat import moe
from kernelcat.errors import KernelcatError
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.parallel.expert_statistics import ExpertStatistics
from kernelcat.moe.parallel.expert_stepping import SteppedRanks
from kernelcat.moe.source import ModelSource
from kernelcat.runtime import driver

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
LIMITS = Limits(step_tokens=128, max_running=4, context=160)


@pytest.fixture(params=["shared", "two"])
def gpus(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The GPUs of two ranks: one that they share, and two."""
    if request.param == "shared":
        return 0, 0
    if driver.count() < 2:
        pytest.skip("needs two GPUs")
    return 0, 1


def opened(name: str, gpus: tuple[int, int], rebalance_every: int = 0) -> SteppedRanks:
    """Two ranks of a small model; its caches are small, because two ranks may share a GPU."""
    source = ModelSource(f"small-{name}", "cuda", True, gpus=gpus)
    num_pages = (80,) * len(moe.windows(source.outline().cache_layers))
    settings = EngineSettings(LIMITS, 16, num_pages, batch_sizes=(1, 4))
    return SteppedRanks(source, settings, 2, rebalance_every)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in (70, 33, 9)]


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("rebalance_every", [0, 5])
def test_ranks_in_graphs_write_what_one_gpu_finds_best(
    name: str, rebalance_every: int, gpus: tuple[int, int]
) -> None:
    """Sums are rounded in another order, so a token may be one whose logit nearly ties the best."""
    ranks = opened(name, gpus, rebalance_every)
    greedy = SamplingParameters(temperature=0, max_tokens=NUM_TOKENS)
    texts = {ranks.submit(prompt, greedy, needs_text=False).id: prompt for prompt in prompts()}
    lengths = {name: len(prompt) for name, prompt in texts.items()}
    while ranks.has_work:
        for output in ranks.step():
            assert not output.error, output.error
            texts[output.request_id] += output.tokens
    statistics = ranks.statistics()
    assert isinstance(statistics, ExpertStatistics)
    assert bool(statistics.moved_experts_total) == bool(rebalance_every)
    ranks.close()
    one = moe.random_model(f"small-{name}", "cuda:0")
    is_near = []
    for request, text in texts.items():
        first = lengths[request] - 1
        (logits,) = prefilled(one, [text])
        rows, chosen = logits[first:-1], torch.tensor(text[first + 1 :], device="cuda:0")
        own = rows.gather(1, chosen[:, None].long())[:, 0]
        is_near.append(rows.amax(1) - own <= DECODE_16 * rows.abs().amax())
    assert all(len(each) == NUM_TOKENS for each in is_near)
    assert torch.cat(is_near).float().mean() >= 0.95


def test_rank_0_is_profiled_kernel_by_kernel(gpus: tuple[int, int], tmp_path: Path) -> None:
    """Its exchanges too, in a graph."""
    ranks = opened("gpt-oss", gpus)
    texts = [list(range(start, start + 40)) for start in range(4)]
    found = ranks.profile_decoding(texts, tmp_path / "trace.json", 8)
    launches = {kernel.name: kernel.launches for kernel in found.kernels}
    for exchange in ("dispatch", "combine"):
        assert sum(n for name, n in launches.items() if exchange in name) >= 2  # of two layers
    assert found.busy_us + found.gap_us == pytest.approx(found.device_us)
    assert found.device_us <= 1.2 * found.step_us
    assert found.floor_share and found.floor_share < 1
    ranks.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_fails_ends_all(number: signal.Signals, gpus: tuple[int, int]) -> None:
    ranks = opened("gpt-oss", gpus)
    greedy = SamplingParameters(temperature=0, max_tokens=80)
    for prompt in prompts():
        ranks.submit(prompt, greedy, needs_text=False)
    ranks.step()
    os.kill(command_of(ranks.process_ids[1]), number)
    start = time.monotonic()
    with pytest.raises(KernelcatError, match="rank 1"):
        while True:
            for output in ranks.step():
                if output.error:
                    raise KernelcatError(output.error)
    assert time.monotonic() - start < ANSWER_S
    ranks.close()
