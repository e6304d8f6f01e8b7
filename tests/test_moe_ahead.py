"""The kernels of an engine: listed without a step, and compiled before the first one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernelcat import catalog, moe, store
from kernelcat.call import signature
from kernelcat.call.ahead import Asked, decide
from kernelcat.call.outline import Outline
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.jit import cache
from kernelcat.moe.engine.ahead import called
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.step_sizes import Size
from kernelcat.moe.rungs import FUSED, GROUPED, Setup
from kernelcat.runtime import gpu
from kernelcat.tune.ahead import compile_ahead


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("small-gpt-oss", FUSED),
        ("small-gpt-oss", GROUPED),
        ("small-deepseek-v3", FUSED),
        ("small-qwen3-moe", FUSED),
    ],
)
def test_steps_call_the_problems_that_are_listed(
    name: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of the warm-up is run by oracles; on a GPU these are the calls of kernels."""
    model = moe.random_model(name, "cpu", torch.bfloat16, max_positions=64)
    model.ops = Setup(has_attention=True, has_products=True, experts=experts).ops(model)
    limits = Limits(step_tokens=20, max_running=2, context=64)
    settings = EngineSettings(
        limits, page_size=16, num_pages=(13,) * len(moe.windows(model.cache_layers)),
        batch_sizes=(1,), speculation=Speculation(1),
    )  # fmt: skip
    served = Engine(model, settings)
    runner, asked = served._runner, set[Problem]()
    infer = signature.infer

    def recorded(*args: object) -> Problem:
        problem = infer(*args)
        asked.add(problem)
        return problem

    with monkeypatch.context() as patched:
        patched.setattr(signature, "infer", recorded)
        runner.warm_up(has_graphs=False)
    listed = called(model, runner.cache, runner.sizes.every(), runner.manager.table_width)
    assert len(listed) == len(set(listed)) > 20
    assert set(listed) == asked


@pytest.mark.parametrize(
    ("tokens", "entries"),
    [
        (64, {"qkv_rope_write", "out_router"}),
        (65, {"qkv_rope_write", "gemm"}),
        (128, {"qkv_rope_write", "gemm"}),
        (129, {"gemm", "kv_write"}),
    ],
)
def test_projections_to_queries_are_one_call_for_up_to_128_tokens(
    tokens: int, entries: set[str]
) -> None:
    """An output projection is fused for up to 64; head norms leave projections apart."""
    fusable = {"qkv_rope_write", "out_router", "gemm", "kv_write"}
    for name in ("small-llama", "small-gpt-oss", "small-qwen3-moe"):
        model = moe.random_model(name, "cpu", torch.bfloat16, max_positions=256)
        groups = len(moe.windows(model.cache_layers))
        cache = moe.KvCache.allocate(
            model.cache_layers, [17] * groups, 16, model.dtype, model.device
        )
        found = {
            problem.entry for problem in called(model, cache, [Size(1, tokens, 1, tokens)], 16)
        }
        if name == "small-qwen3-moe":
            assert {"gemm", "kv_write"} <= found and "qkv_rope_write" not in found
        else:
            others = {"gemm"} if name == "small-llama" else set()  # its MLP
            assert found & fusable == entries | others


def test_an_outline_has_the_shapes_of_the_call() -> None:
    asked: list[Problem] = []
    a, b = torch.empty(3, 64, device="meta"), torch.empty(5, 64, device="meta")
    out = Outline("gemm", asked.append)(a.half(), b.half())
    assert out.shape == (3, 5) and out.dtype == torch.float16 and out.is_meta
    [problem] = asked
    assert (problem["M"], problem["N"], problem["K"]) == (3, 5, 64)
    with pytest.raises(InvalidArgument, match="K"):
        Outline("gemm", asked.append)(a.half(), b[:, :32].half())


def test_what_calls_choose_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_memory", {})
    h200 = gpu.find("h200")
    problems = [
        catalog.entry("rms_norm").named("M=8,N=2880,dtype=bfloat16"),
        catalog.entry("rms_norm").named("M=9,N=2880,dtype=bfloat16"),
        catalog.entry("embedding").named("tokens=8,vocab=512,hidden=2880,dtype=bfloat16"),
    ]
    num_new = compile_ahead(problems, h200, 2)
    assert num_new == len(cache.sizes()) >= 2
    monkeypatch.setattr("kernelcat.jit.cuda.CudaSource.compile", None)  # nothing is compiled again
    for problem in problems:
        decide(Asked(problem), h200, store.snapshot())
    assert compile_ahead(problems, h200, 2) == 0
