"""The engine on a GPU: CUDA graphs, memory, and ten thousand steps."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelcat import moe
from kernelcat.call.operator import Op
from kernelcat.errors import InvalidArgument
from kernelcat.moe.divergence import Prompts
from kernelcat.moe.engine.building import RESERVED_BYTES
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason, Request
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.ladder import Plan, climb
from kernelcat.moe.profile import profile_decoding
from kernelcat.moe.source import ModelSource

pytestmark = pytest.mark.gpu

MAX_LAUNCHES = 7
"""Launches of a layer in decode at batch 8 or less."""
NUM_STEPS = 10_000


def engine(model: moe.Decoder, limits: Any = (), **settings: Any) -> Engine:
    sizes = {"step_tokens": 128, "max_running": 8, "context": 256, **dict(limits)}
    defaults = {"page_size": 16, "num_pages": (200,) * len(moe.windows(model.cache_layers))}
    return Engine(model, EngineSettings(limits=Limits(**sizes), **{**defaults, **settings}))


def finish(served: Engine) -> None:
    while served.has_work:
        for output in served.step():
            assert not output.error
        served.check_integrity()


@pytest.mark.parametrize("name", ("small-gpt-oss", "small-llama", "small-deepseek-v3"))
def test_a_replay_computes_what_a_run_without_a_graph_computes(name: str) -> None:
    served = engine(moe.random_model(name), is_overlapped=False)
    runner, errors = served._runner, []
    replay = runner._forward

    def both(host: Any) -> torch.Tensor:
        x = replay(host)
        if host.arrays.size in runner.graphs:
            x = x.clone()
            expected = runner.model(runner._device.batch(host), runner.cache)
            rows = slice(0, int((host.arrays.kv_lens > 16).sum()))  # without the padding
            error = (x[rows] - expected[rows]).abs().max() / expected[rows].abs().max()
            errors.append(float(error))
        return x

    runner._forward = both
    for i in range(5):
        served.submit([7 * i + 1] * (17 + 9 * i), SamplingParameters(temperature=0, max_tokens=9))
    finish(served)
    assert len(errors) >= 8 and max(errors) < 1e-2


def test_overlapped_steps_write_the_tokens_of_steps_one_by_one() -> None:
    """Both are the same launches in the same sizes, so tokens are equal."""
    model, found = moe.random_model("small-gpt-oss"), []
    for is_overlapped in (False, True):
        served = engine(model, is_overlapped=is_overlapped)
        requests = [
            served.submit(
                [i + 1] * 20, SamplingParameters(seed=i, temperature=i % 2, max_tokens=30)
            )
            for i in range(8)
        ]
        finish(served)
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]


@pytest.mark.parametrize("batch", (1, 8))
def test_a_layer_of_gpt_oss_is_few_nodes_of_a_graph(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    kept = partial(torch.cuda.CUDAGraph, keep_graph=True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kept)

    def num_nodes(num_layers: int) -> int:
        config = replace(moe.SIZES["gpt-oss-20b"], num_hidden_layers=num_layers, layer_types=())
        served = engine(
            moe.random_model(config, max_positions=2048),
            {"context": 1024, "max_running": batch}, page_size=64, batch_sizes=(batch,),
        )  # fmt: skip
        [graph] = served._runner.graphs.values()
        status, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.graph.raw_cuda_graph()), 0)
        assert status == driver.CUresult.CUDA_SUCCESS
        served.close()
        return int(count)

    assert num_nodes(4) - num_nodes(2) <= 2 * MAX_LAUNCHES


def resident_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ten_thousand_steps_compile_nothing_and_keep_memory_flat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, dice = moe.random_model("small-gpt-oss"), random.Random(0)
    served = engine(model, num_pages=(45, 30), speculation=Speculation(2, 1))
    built: list[Any] = []
    build = Op._build
    monkeypatch.setattr(Op, "_build", lambda *args: built.append(args[1]) or build(*args))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.2}, {"logprobs": 5},
    ]  # fmt: skip

    def submit() -> Request:
        prompt = dice.choices(range(256), k=dice.choice((1, 5, 40, 150)))
        parameters = SamplingParameters(**dice.choice(kinds), max_tokens=dice.randint(1, 60))
        return served.submit(prompt, parameters)

    host, device = [], []
    for _ in range(10):
        end = served.statistics().steps_total + NUM_STEPS // 10
        while served.statistics().steps_total < end:
            while served.statistics().requests_waiting < 2:
                request = submit()
                if dice.random() < 0.02:
                    served.cancel(request.id)
            assert not [output.error for output in served.step() if output.error]
        finish(served)
        gc.collect()
        host.append(resident_bytes())
        device.append(torch.cuda.memory_reserved())
    assert built == []
    assert max(host[2:]) - host[1] < 8 << 20
    assert device[-1] == device[1]
    assert served.statistics().preemptions_total > 10


def test_pages_take_the_memory_that_is_left_and_too_little_is_told() -> None:
    model = moe.random_model("small-gpt-oss")
    total = torch.cuda.get_device_properties(model.device).total_memory
    free, _ = torch.cuda.mem_get_info()
    part = (total - free) / total + 0.05
    limits = Limits(context=512, max_running=8)
    served = Engine(model, EngineSettings(limits=limits, memory=part))
    free, _ = torch.cuda.mem_get_info()
    reserved = RESERVED_BYTES / total
    assert part - reserved - 0.01 < (total - free) / total < part + 0.01
    served.submit([1, 2, 3], SamplingParameters(temperature=0, max_tokens=4))
    finish(served)
    served.close()
    del served
    with pytest.raises(InvalidArgument, match=r"memory=0\.01 of the GPU's .* one request of"):
        Engine(model, EngineSettings(limits=limits, memory=0.01))


def test_an_error_between_launches_ends_its_requests_only() -> None:
    model = moe.random_model("small-gpt-oss")
    served = engine(model, {"max_running": 2}, is_overlapped=True)
    runner, calls = served._runner, []
    forward = runner._forward

    def failing(host: Any) -> torch.Tensor:
        calls.append(host)
        if len(calls) == 3:
            raise RuntimeError("a launch failed")
        return forward(host)

    runner._forward = failing
    parameters = SamplingParameters(temperature=0, max_tokens=6)
    requests = [served.submit([i + 1] * 20, parameters) for i in range(3)]
    while served.has_work:
        served.step()
        served.check_integrity()
    reasons = [request.finish_reason for request in requests]
    assert reasons == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]


def test_without_graphs_the_same_tokens_are_written() -> None:
    model = moe.random_model("small-gpt-oss")
    written = []
    for has_graphs in (False, True):
        served = engine(model, batch_sizes=(1, 4), has_graphs=has_graphs)
        assert len(served._runner.graphs) == (3 if has_graphs else 0)  # 1, 4 and max_running
        requests = [
            served.submit(list(range(start, start + 40)), SamplingParameters(temperature=0))
            for start in range(3)
        ]
        finish(served)
        written.append([request.tokens for request in requests])
    assert written[0] == written[1]


def test_every_rung_of_the_ladder_runs() -> None:
    source = ModelSource.find("small-gpt-oss", "cuda", True)
    plan = Plan((1, 8), 100, 24, 1, 1024, Prompts(4, 40, 4))
    results = climb(source, plan)
    assert not [result.reason for result in results if result.reason]
    for result in results:
        assert result.memory_bytes and result.divergence is not None
        exact = result.name not in ("FP8 cache", "FP8 attention", "FP8 lm_head", "prefix cache",
                                    "speculation")  # fmt: skip
        assert 0 <= result.divergence < (1e-2 if exact else 0.5)


def test_a_decode_step_is_profiled_kernel_by_kernel(tmp_path: Path) -> None:
    model = moe.random_model("small-gpt-oss")
    served = engine(model, batch_sizes=(1, 4))
    texts = [list(range(start, start + 40)) for start in range(4)]
    found = profile_decoding(served, texts, tmp_path / "trace.json", 8)
    launches = sum(kernel.launches for kernel in found.kernels)
    assert launches >= len(model.layers) * 4  # also those in a graph
    assert found.busy_us > 0 and found.gap_us >= 0
    assert found.busy_us + found.gap_us == pytest.approx(found.device_us)
    assert found.device_us <= 1.2 * found.step_us
    assert found.floor_us and found.floor_share and found.floor_share < 1
    served.check_integrity()
