"""out_router: kernels on the CPU, and what the tolerance lets peers round."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cuda_fibers import COMPILER, Host
from formulations.layers import rounded

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.kernels.cuda.out_router import naive, products, streamed
from kernelcat.reference.out_router import ENTRY, routed
from kernelcat.runtime import gpu
from kernelcat.verify import gate

NUMPY = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
CASES = {
    "biases": routed(5, 72, 40, 7, bias=True, router_bias=True),
    "no router": routed(3, 33, 70),
    "a router without experts": routed(2, 16, 24, has_router=True, dtype="float16"),
    "no columns of attn": routed(2, 0, 24, 3, router_bias=True),
    "no hidden columns": routed(2, 16, 0, 3, router_bias=True),
    "no tokens": routed(0, 16, 24, 3),
}


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", CASES)
def test_the_naive_kernels_are_right_on_the_host(name: str) -> None:
    every_block = Host(max_blocks=1 << 30)  # grids have a warp for each element
    verdict = gate.check(naive.IMPLEMENTATION, CASES[name], Config(), every_block, seeds=(0, 1))
    assert verdict.passed, verdict.detail


WIDE_RING = Config(stage_cols=1024, num_warps=16, ring_kb=64)
NARROW_RING = Config(stage_cols=256, num_warps=8, ring_kb=64)
STREAMED = {
    "biases": (WIDE_RING, CASES["biases"]),
    "two rounds of a ring that is refilled, two groups of tokens": (
        NARROW_RING, routed(20, 264, 488, 19, router_bias=True),
    ),
    "no router, an odd number of groups": (NARROW_RING, routed(3, 40, 72)),
    "a router without experts": (WIDE_RING, CASES["a router without experts"]),
    "float16 divides before the product": (NARROW_RING, routed(9, 8, 520, 9, dtype="float16")),
    "no columns of attn": (WIDE_RING, CASES["no columns of attn"]),
    "no hidden columns": (WIDE_RING, CASES["no hidden columns"]),
    "no tokens": (WIDE_RING, CASES["no tokens"]),
}  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_weights_are_multiplied_right_on_the_host(name: str) -> None:
    config, problem = STREAMED[name]
    host = Host(max_blocks=1 << 30, sms=2)  # a thread block gets many groups of rows
    assert streamed.IMPLEMENTATION.why_not(config, problem, host.gpu) is None
    verdict = gate.check(streamed.IMPLEMENTATION, problem, config, host, seeds=(0,))
    assert verdict.passed, verdict.detail


def test_what_streamed_cannot_serve_is_refused_with_the_value() -> None:
    def reason(problem: Problem) -> str | None:
        return streamed.IMPLEMENTATION.why_not(WIDE_RING, problem, gpu.find("h200"))

    why = "must be a multiple of 8: copies move whole 16 bytes"
    assert reason(routed(1, 64, 63)) == f"hidden=63 {why}"
    assert reason(routed(1, 12, 64)) == f"width=12 {why}"
    assert reason(routed(64, 16, 64)) is None
    assert reason(routed(65, 16, 64)) == "tokens=65 are more than the 64 of which an SM holds sums"


PRODUCTS = {
    "biases": (Config(tile="64x16", split_k=1), CASES["biases"]),
    "three splits, 33 tokens, two tiles": (
        Config(tile="64x48", split_k=3), routed(33, 520, 72, 19, bias=True, router_bias=True)
    ),
    "two consumers, float16, 64 tokens": (
        Config(tile="128x64", split_k=2), routed(64, 264, 200, 9, dtype="float16")
    ),
    "no router": (Config(tile="64x32", split_k=1), routed(20, 40, 72)),
    "no tokens": (Config(tile="64x16", split_k=1), CASES["no tokens"]),
}  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_grid_wide_product_is_right_on_the_host(name: str) -> None:
    config, problem = PRODUCTS[name]
    host = Host(max_blocks=1 << 30)  # the second grid has a thread block for each token
    assert products.IMPLEMENTATION.why_not(config, problem, host.gpu) is None
    verdict = gate.check(products.IMPLEMENTATION, problem, config, host, seeds=(0, 1))
    assert verdict.passed, verdict.detail


def test_what_products_cannot_serve_is_refused_with_the_value() -> None:
    def reason(problem: Problem, split_k: int = 1) -> str | None:
        config = Config(tile="64x64", split_k=split_k)
        return products.IMPLEMENTATION.why_not(config, problem, gpu.find("h200"))

    assert reason(routed(65, 16, 64)) == (
        "tokens=65 are more than the 64 of the launch that normalizes"
    )
    assert reason(routed(1, 64, 63)) == (
        "hidden=63 must be a positive multiple of 8: loads move whole 16 bytes"
    )
    assert "K=12 must be a positive multiple of 8" in str(reason(routed(1, 12, 64)))
    assert "each of 3 splits needs one" in str(reason(routed(1, 64, 64), 3))


@pytest.mark.parametrize("model", ["gptoss", "qwen3-30b", "llama-8b", "deepseek-v3"])
def test_products_are_chosen_for_tens_of_tokens_only(model: str) -> None:
    h200 = gpu.find("h200")
    variants = (streamed.IMPLEMENTATION, products.IMPLEMENTATION)

    def chosen(problem: Problem) -> str:
        return min(
            variants, key=lambda one: one.estimate(problem, one.default(problem, h200), h200)
        ).variant

    named = {tokens: chosen(ENTRY.named(f"{model}-{tokens}")) for tokens in (1, 8, 64)}
    assert named == {1: "streamed", 8: "streamed", 64: "products"}


def test_thread_blocks_of_the_second_launch_that_find_no_sm_wait() -> None:
    """64 tokens and 256 experts have 320, three waves: 78.3 us, of which `gemm` takes 61.5."""
    h200, problem = gpu.find("h200"), ENTRY.named("deepseek-v3-64")
    config = Config(tile="64x64", split_k=1)
    us = products.IMPLEMENTATION.estimate(problem, config, h200)
    assert us == pytest.approx(78.3, rel=0.05)


def test_a_product_rounded_before_the_residual_is_within_tolerance() -> None:
    """Peers round it; an element that keeps its old value in the oracle's h would refuse them."""
    problem = routed(16, 512, 600, 30, bias=True)
    prepared = gate.prepare(ENTRY, problem, NUMPY, 5)
    inputs = gate.decoded(ENTRY, problem, prepared.arrays)
    product = rounded(problem, inputs["attn"] @ inputs["wo"].T + inputs["bo"])
    h = rounded(problem, inputs["residual"] + product)
    root = np.sqrt((h * h).mean(axis=1, keepdims=True) + problem["eps"])
    x = rounded(problem, h / root * inputs["norm_weight"])
    results = {"residual": h, "x": x, "logits": x @ inputs["router"].T}

    def run() -> None:
        for tensor in ENTRY.outputs:
            values = results[tensor.name].astype("float32")
            stored = dtypes.encode(values, tensor.dtype_of(problem))
            prepared.arrays[tensor.name][...] = stored

    verdict = prepared.verify_run(run)
    assert verdict.passed, verdict.detail


def test_experts_need_a_router() -> None:
    with pytest.raises(InvalidArgument, match="experts=8 must be 0 without a router"):
        ENTRY.problem(tokens=1, width=64, hidden=64, experts=8, dtype="bfloat16")


# ---- Triton ---------------------------------------------------------------------------------

WIDE = {"tile": "32x256", "split_k": 3, "stages": 4, "depth": 128}
NARROW = {"tile": "128x64", "split_k": 1, "stages": 6, "depth": 256}
TILED = {
    "tiled, biases, splits of unequal depth": (WIDE, CASES["biases"].values | {"width": 600}),
    "tiled, a split without columns": (WIDE, CASES["biases"].values | {"width": 300}),
    "tiled, three groups of tokens": (
        WIDE, routed(131, 72, 290, 33, bias=True, router_bias=True, dtype="float16").values
    ),
    "tiled, no router": (NARROW, CASES["no router"].values | {"hidden": 300}),
    "tiled, no columns of attn": (WIDE, CASES["no columns of attn"].values),
    "tiled, no hidden columns": (NARROW, CASES["no hidden columns"].values),
    "tiled, a router without experts": (NARROW, CASES["a router without experts"].values),
    "tiled, no tokens": (NARROW, CASES["no tokens"].values),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(interpreted) -> dict[str, list]:
    cases = {name: ("out_router", "naive", {}, case.values) for name, case in CASES.items()}
    cases |= {name: ("out_router", "tiled", *case) for name, case in TILED.items()}
    first = next(iter(TILED))
    return interpreted({**cases, "replay": (*cases[first], "replay")})


@pytest.mark.parametrize("name", [*CASES, *TILED])
def test_a_triton_kernel_is_right_at_its_edges(results, name: str) -> None:
    reason, passed, detail = results[name]
    assert reason is None
    assert passed, detail


def test_a_replay_with_other_inputs_is_right_on_the_same_workspaces(results) -> None:
    assert results["replay"] == [[True, True], 0]


def test_each_program_waits_for_the_kernels_before_it() -> None:
    pytest.importorskip("triton")
    tiled = catalog.implementation("out_router", "triton", "tiled")
    for name, is_programmatic in (("h200", True), ("a100", False)):
        steps = tiled.program(CASES["biases"], Config(NARROW), gpu.find(name)).steps
        assert [step.programmatic for step in steps] == [is_programmatic] * 2
        constants = [step.source.constants["DEPENDENT"] for step in steps]
        assert constants == [is_programmatic] * 2


def test_what_tiled_cannot_serve_is_refused_with_the_value() -> None:
    pytest.importorskip("triton")
    tiled, h200 = catalog.implementation("out_router", "triton", "tiled"), gpu.find("h200")
    reason = tiled.why_not(Config(WIDE), routed(1, 64, 8200, 8), h200)
    assert reason == "hidden=8200 has more than 64 parts of depth=128: use depth=256"
    assert tiled.why_not(Config(NARROW), routed(1, 64, 8200, 8), h200) is None
    reason = tiled.why_not(Config(WIDE), routed(1 << 22, 64, 64), h200)
    assert reason is not None and "tokens=4194304" in reason
