"""The engine on a GPU: CUDA graphs, memory, true sizes, and ten thousand steps."""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from kernelcat.moe.engine.speculation import NgramIndex, Speculation
from kernelcat.moe.engine.step_sizes import Size
from kernelcat.moe.ladder import Plan, climb
from kernelcat.moe.profile import profile_decoding
from kernelcat.moe.source import ModelSource

pytestmark = pytest.mark.gpu

MAX_LAUNCHES = 7
"""Launches of a layer in decode at batch 8 or less."""
NUM_STEPS = 10_000
SLOW_S, HANGING_S = 240, 400
"""Seconds after which ten thousand steps are too slow, and after which nothing moves any more."""
GREEDY = SamplingParameters(temperature=0, max_tokens=9)


def engine(model: moe.Decoder, limits: Any = (), **settings: Any) -> Engine:
    sizes = {"step_tokens": 128, "max_running": 8, "context": 256, **dict(limits)}
    defaults = {"page_size": 16, "num_pages": (200,) * len(moe.windows(model.cache_layers))}
    return Engine(model, EngineSettings(limits=Limits(**sizes), **{**defaults, **settings}))


def finish(served: Engine) -> None:
    while served.has_work:
        for output in served.step():
            assert not output.error
        served.check_integrity()


def compare_replays(served: Engine) -> list[tuple[Size, float]]:
    """Sizes of the steps to come that are graphs, and what a run without a graph computes: the
    largest difference of hidden states, as a part of the largest one.

    The list grows with each step. Prompts must be longer than a page.
    """
    runner, found = served._runner, list[tuple[Size, float]]()
    replay, page = runner._forward, runner.manager.page_size

    def both(buffers: Any) -> torch.Tensor:
        x, arrays = replay(buffers), buffers.arrays
        if (buffers, arrays.size) in runner.graphs:
            x = x.clone()
            expected = runner.model(buffers.batch(), runner.cache)
            num_own = int((arrays.kv_lens > page).sum())  # without the padding
            rows = slice(0, int(arrays.cu_q[num_own]))
            error = (x[rows] - expected[rows]).abs().max() / expected[rows].abs().max()
            found.append((arrays.size, float(error)))
        return x

    runner._forward = both
    return found


@pytest.mark.parametrize("speculation", (None, Speculation(3, 1)), ids=("plain", "drafts"))
@pytest.mark.parametrize("name", ("small-gpt-oss", "small-llama", "small-deepseek-v3"))
def test_a_replay_computes_what_a_run_without_a_graph_computes(
    name: str, speculation: Speculation | None
) -> None:
    """Prompts have every token, so a draft follows each token that is written."""
    served = engine(
        moe.random_model(name), {"context": 300}, is_overlapped=False, speculation=speculation
    )
    found = compare_replays(served)
    for i in range(5):
        first = 40 * i
        served.submit([*range(first, 256), *range(first)], GREEDY)
    finish(served)
    assert max(error for _, error in found) < 1e-2
    bounds = {size.max_q for size, _ in found}
    assert 4 in bounds if speculation else bounds == {1} and len(found) >= 8


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
        graph, _ = served._runner.graphs.values()  # one for each step in flight
        status, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.graph.raw_cuda_graph()), 0)
        assert status == driver.CUresult.CUDA_SUCCESS
        served.close()
        return int(count)

    assert num_nodes(4) - num_nodes(2) <= 2 * MAX_LAUNCHES


def resident_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextmanager
def watched(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """What is printed is seen at once; if nothing moves any more, the run ends with all stacks."""
    with capsys.disabled():
        faulthandler.dump_traceback_later(HANGING_S, exit=True, file=sys.__stderr__)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def test_ten_thousand_steps_compile_nothing_and_keep_memory_flat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with watched(capsys):
        run_ten_thousand_steps(monkeypatch)


def run_ten_thousand_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes of steps, because a bare machine compiles every kernel of each of them."""
    start = time.monotonic()
    model, dice = moe.random_model("small-gpt-oss"), random.Random(0)
    served = engine(
        model, {"step_tokens": 64}, num_pages=(45, 30), speculation=Speculation(2, 1),
        batch_sizes=(2,),
    )  # fmt: skip
    print(f"\nready after {time.monotonic() - start:.1f} s")
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
        steps, seconds = served.statistics().steps_total, time.monotonic() - start
        print(f"{steps:6} steps, {seconds:5.1f} s, host {host[-1] / 1e6:.1f} MB")
        assert seconds < SLOW_S, f"{steps} of {NUM_STEPS} steps took {seconds:.0f} s"
    assert built == []
    assert max(host[2:]) - host[1] < 8 << 20
    assert device[-1] == device[1]
    totals = served.statistics()
    assert totals.preemptions_total > 5 and totals.accepted_tokens_total > 200


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


def test_weights_that_do_not_fit_are_told_and_leave_nothing() -> None:
    """DeepSeek-V3 as a whole is 1.3 TB."""
    before = torch.cuda.memory_allocated()
    with pytest.raises(InvalidArgument, match="the weights of deepseek-v3 do not fit"):
        ModelSource("deepseek-v3", "cuda", has_random_weights=True).open()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_an_error_between_launches_ends_its_requests_only() -> None:
    model = moe.random_model("small-gpt-oss")
    served = engine(model, {"max_running": 2}, is_overlapped=True)
    runner, calls = served._runner, []
    forward = runner._forward

    def failing(buffers: Any) -> torch.Tensor:
        calls.append(buffers)
        if len(calls) == 3:
            raise RuntimeError("a launch failed")
        return forward(buffers)

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
        # 1, 4 and max_running, for each step in flight
        assert len(served._runner.graphs) == (6 if has_graphs else 0)
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


# ---- true sizes ----------------------------------------------------------------------------------


def needs_memory(num_bytes: float) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    if total < num_bytes:
        pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of device memory, and there are {total / 1e9}")


def test_gpt_oss_120b_runs_on_one_gpu() -> None:
    """Weights are drawn and packed on the device; four requests write at once."""
    needs_memory(90e9)
    torch.cuda.empty_cache()
    before, start = torch.cuda.memory_allocated(), time.monotonic()
    torch.cuda.reset_peak_memory_stats()
    model = moe.random_model("gpt-oss-120b", max_positions=4096)
    torch.cuda.synchronize()
    seconds, weights = time.monotonic() - start, torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{weights / 1e9:.1f} GB in {seconds:.1f} s, {peak / 1e9:.1f} GB at most")
    assert 65e9 < weights < 66e9 and peak < weights + 8e9 and seconds < 60
    limits = Limits(step_tokens=256, max_running=8, context=4096)
    served = Engine(model, EngineSettings(limits, batch_sizes=(8,), is_overlapped=False))
    assert served.statistics().pages * served.settings.page_size > 8 * 4096
    found = compare_replays(served)
    requests = [served.submit([i + 1] * (100 + i), GREEDY) for i in range(4)]
    finish(served)
    assert [request.num_written for request in requests] == [GREEDY.max_tokens] * 4
    assert len(found) >= 8 and max(error for _, error in found) < 1e-2
    served.close()


@pytest.mark.parametrize("speculation", (None, Speculation(3, 1)), ids=("plain", "drafts"))
def test_layers_of_deepseek_v3_decode_with_flashmla(
    speculation: Speculation | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense layer and one with 256 experts, at their true sizes: 28 GB. Drafts need not be good:
    what verifies them computes the same."""
    needs_memory(50e9)
    monkeypatch.setattr(NgramIndex, "propose", lambda _, count: [7] * count)
    config = replace(moe.SIZES["deepseek-v3"], num_hidden_layers=2, first_k_dense_replace=1)
    model = moe.random_model(config, max_positions=1024)
    calls, flashmla = [], model.ops.flashmla

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(named["max_q"])
        return flashmla(*args, **named)

    model.ops = replace(model.ops, flashmla=counted)
    served = engine(
        model, {"context": 512}, page_size=64, num_pages=(65,), batch_sizes=(8,),
        speculation=speculation, is_overlapped=False,
    )  # fmt: skip
    found = compare_replays(served)
    for i in range(4):
        served.submit([*range(100 * i, 100 * i + 100), 100 * i], GREEDY)
    finish(served)
    bound = 4 if speculation else 1
    assert len([size for size, _ in found if size.max_q == bound]) >= 6 and bound in calls
    assert max(error for _, error in found) < 1e-2
    served.close()
