"""qkv_rope_write: kernels on the CPU, and YaRN's table of angles."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cuda_fibers import COMPILER, Host

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.qkv_rope_write import naive, products, streamed
from kernelcat.moe.rope import Rope
from kernelcat.reference.qkv_rope_write import ENTRY, FP8, projected
from kernelcat.runtime import gpu
from kernelcat.verify import gate

NUMPY = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
CASES = {
    "biases": projected(3, 3, 2, 64, 72, bias=True, context=40, q_len=2),
    "float8 with scales of pages": projected(
        2, 2, 1, 64, 33, kv_dtype=FP8, has_scales=True, page_scales=True, lengths="ragged"
    ),
    "interleaved, half of a head": projected(
        2, 1, 2, 128, 40, style="interleaved", rotary_dim=64, dtype="float16", kv_dtype="float16"
    ),
    "no queries, no RoPE, no columns": projected(1, 0, 1, 64, 0, rotary_dim=0, bias=True),
}


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", CASES)
def test_the_naive_kernel_is_right_on_the_host(name: str) -> None:
    every_block = Host(max_blocks=1 << 30)  # the grid has a thread block for each head
    verdict = gate.check(naive.IMPLEMENTATION, CASES[name], Config(), every_block, seeds=(0,))
    assert verdict.passed, verdict.detail


WIDE_RING = Config(stage_cols=512, num_warps=16, ring_kb=64)
NARROW_RING = Config(stage_cols=256, num_warps=8, ring_kb=64)
STREAMED = {
    "biases": (WIDE_RING, CASES["biases"]),
    "a ring that is refilled, two slices": (NARROW_RING, projected(9, 3, 1, 64, 264, bias=True)),
    "four rounds, 33 tokens": (NARROW_RING, projected(33, 2, 1, 64, 40)),
    "float8 with scales of pages, float16": (
        NARROW_RING,
        projected(2, 2, 1, 64, 520, dtype="float16", kv_dtype=FP8, has_scales=True,
                  page_scales=True, lengths="ragged"),
    ),
    "interleaved, half of a head": (WIDE_RING, CASES["interleaved, half of a head"]),
    "40 of 64 elements": (WIDE_RING, projected(2, 1, 1, 64, 8, rotary_dim=40)),
    "no queries, no RoPE, no columns": (WIDE_RING, CASES["no queries, no RoPE, no columns"]),
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
    def reason(problem: Problem, config: Config = WIDE_RING) -> str | None:
        return streamed.IMPLEMENTATION.why_not(config, problem, gpu.find("h200"))

    assert reason(projected(65, 1, 1, 64, 64)) == (
        "tokens=65 are more than the 64 of which an SM holds sums"
    )
    assert reason(projected(1, 1, 1, 64, 33)) == (
        "hidden=33 must be a multiple of 8: copies move whole 16 bytes"
    )
    assert reason(projected(1, 1, 1, 64, 64, rotary_dim=10)) == (
        "rotary_dim=10 must be a multiple of 8: the rows of a stage are whole pairs of the rotation"
    )
    assert reason(ENTRY.named("gptoss-1"), Config(WIDE_RING, stage_cols=256)) == (
        "stage_cols=256 are less than 32 for each of 16 warps"
    )
    largest = Config(stage_cols=256, num_warps=8, ring_kb=192)
    assert "bytes of shared memory; 232448 fit" in str(reason(ENTRY.named("gptoss-64"), largest))


PRODUCTS = {
    "biases, a tile of one head, no splits": (
        Config(split_k=1, ring_kb=96), projected(3, 3, 2, 64, 72, bias=True, context=40, q_len=2)
    ),
    "three splits, a ring that is refilled, 33 tokens": (
        Config(split_k=3, ring_kb=96), projected(33, 2, 1, 64, 1672, bias=True)
    ),
    "a head of 128, 65 tokens": (Config(split_k=2, ring_kb=96), projected(65, 1, 1, 128, 520)),
    "float8 with scales of pages, float16": (
        Config(split_k=2, ring_kb=192),
        projected(20, 2, 1, 64, 264, dtype="float16", kv_dtype=FP8, has_scales=True,
                  page_scales=True, lengths="ragged"),
    ),
    "interleaved, half of a head": (
        Config(split_k=1, ring_kb=96), CASES["interleaved, half of a head"]
    ),
    "40 of 64 elements": (
        Config(split_k=1, ring_kb=96), projected(2, 1, 1, 64, 8, rotary_dim=40)
    ),
}  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("name", PRODUCTS)
def test_grid_wide_products_are_right_on_the_host(name: str, monkeypatch) -> None:
    # On this machine static shared memory is each thread's own: rows of a warp need none.
    of_a_warp = Config(threads=32, rows=1)
    monkeypatch.setattr(products, "norm_config", lambda norm, gpu: of_a_warp)
    config, problem = PRODUCTS[name]
    host = Host(max_blocks=1 << 30)  # the grid has a thread block for each split of a tile
    assert products.IMPLEMENTATION.why_not(config, problem, host.gpu) is None
    verdict = gate.check(products.IMPLEMENTATION, problem, config, host, seeds=(0, 1))
    assert verdict.passed, verdict.detail


def test_what_products_cannot_serve_is_refused_with_the_value() -> None:
    def reason(problem: Problem, split_k: int = 1) -> str | None:
        config = Config(split_k=split_k, ring_kb=96)
        return products.IMPLEMENTATION.why_not(config, problem, gpu.find("h200"))

    assert reason(projected(129, 1, 1, 64, 64)) == "tokens=129 are more than the 128 of a tile"
    assert reason(projected(1, 1, 1, 64, 33)) == (
        "hidden=33 must be a positive multiple of 8: TMA needs rows of a multiple of 16 bytes"
    )
    assert reason(projected(1, 0, 1, 64, 64)) == "heads=0 must make tiles of 64 rows"
    assert reason(projected(1, 1, 1, 256, 64)) == (
        "head_dim=256: a tile of 64 or 128 rows is a whole head"
    )
    assert reason(projected(1, 1, 1, 64, 128), 3) == (
        "hidden=128 has 2 k-blocks of 64, and each of 3 splits needs one"
    )


def chosen(problem: Problem) -> str:
    """The variant with the least estimate on an H200."""
    h200 = gpu.find("h200")
    variants = (streamed.IMPLEMENTATION, products.IMPLEMENTATION)
    return min(
        variants, key=lambda one: one.estimate(problem, one.default(problem, h200), h200)
    ).variant


@pytest.mark.parametrize("model", ["gptoss", "llama-8b"])
def test_products_are_chosen_for_tens_of_tokens_only(model: str) -> None:
    named = {tokens: chosen(ENTRY.named(f"{model}-{tokens}")) for tokens in (1, 8, 64)}
    assert named == {1: "streamed", 8: "streamed", 64: "products"}


def test_queries_turn_as_the_paper_of_yarn_says() -> None:
    """Pairs with at least 32 turns in the original context keep their frequency, pairs with at most
    one turn are ``factor`` times slower, and all become 0.1 ln(factor) + 1 times as long.
    """
    rope = Rope(
        rope_theta=150000.0, rope_type="yarn", factor=32.0, truncate=False,
        original_max_position_embeddings=4096,
    )  # fmt: skip
    problem = projected(1, 3, 1, 64, 40, context=100)
    inputs = gate.decoded(ENTRY, problem, gate.prepare(ENTRY, problem, NUMPY).arrays)

    def queries(cos_sin):
        first, second = np.split(
            ENTRY.oracle(problem, inputs | {"cos_sin": cos_sin})["q_out"], 2, 2
        )
        return first + 1j * second

    frequency = 150000.0 ** (-np.arange(32) / 32)
    turns = 4096 * frequency / (2 * np.pi)
    fast, slow = turns >= 32, turns <= 1
    assert fast.sum() == 9 and slow.sum() == 14
    angle = 99 * np.where(slow, frequency / 32, frequency)  # the new token is the last of 100
    expected = queries(np.repeat([[1.0, 0.0]], 32, 1).repeat(100, 0))
    expected *= (0.1 * np.log(32) + 1) * np.exp(1j * angle)
    turned = queries(rope.table(64, 100).numpy())
    assert np.allclose(turned[..., fast | slow], expected[..., fast | slow], atol=1e-4)


# ---- Triton ---------------------------------------------------------------------------------

SPLIT = {"block_k": 64, "split_k": 3, "stages": 4}
WHOLE = {"block_k": 128, "split_k": 1, "stages": 3}
TILED = {
    "tiled, splits of unequal depth, two groups of tokens": (
        SPLIT, projected(70, 2, 1, 64, 200, bias=True)
    ),
    "tiled, a split without columns": (SPLIT, CASES["biases"]),
    "tiled, float8 with scales of pages": (WHOLE, CASES["float8 with scales of pages"]),
    "tiled, scales of heads": (SPLIT, projected(2, 2, 3, 64, 33, kv_dtype=FP8, has_scales=True)),
    "tiled, interleaved, half of a head": (SPLIT, CASES["interleaved, half of a head"]),
    "tiled, 48 of 128 elements": (WHOLE, projected(3, 1, 1, 128, 150, rotary_dim=48)),
    "tiled, no queries, no RoPE, no columns": (SPLIT, CASES["no queries, no RoPE, no columns"]),
}  # fmt: skip

LARGE = """
def large(entry, variant, config, axes):
    # float16 rows whose products with norm_weight are infinite unless x is divided first.
    spec = catalog.entry(entry)
    problem = spec.problem(**axes)
    inputs = gate.drawn(spec, problem, np, 0)
    inputs["x"], inputs["norm_weight"] = 40000 + 0 * inputs["x"], 4 + 0 * inputs["norm_weight"]
    drawn = replace(spec, make_inputs=lambda problem, normal: inputs)
    prepared = gate.prepare(drawn, problem, device)
    implementation = catalog.implementation(entry, "triton", variant)
    program = implementation.program(problem, Config(config), device.gpu)
    return prepared.verify(lambda arrays: lambda: interpret(program, arrays)).detail
"""


@pytest.fixture(scope="module")
def results(interpreted) -> dict[str, list]:
    cases = {name: ("qkv_rope_write", "naive", {}, case.values) for name, case in CASES.items()}
    cases |= {
        name: ("qkv_rope_write", "tiled", config, case.values)
        for name, (config, case) in TILED.items()
    }
    large = projected(2, 1, 1, 64, 130, dtype="float16", kv_dtype="float16").values
    more = {
        "large": ("qkv_rope_write", "tiled", SPLIT, large, "large"),
        "replay": (*cases["tiled, a split without columns"], "replay"),
    }
    return interpreted({**cases, **more}, LARGE)


@pytest.mark.parametrize("name", [*CASES, *TILED])
def test_a_triton_kernel_is_right_at_its_edges(results, name: str) -> None:
    reason, passed, detail = results[name]
    assert reason is None
    assert passed, detail


def test_large_float16_rows_do_not_overflow(results) -> None:
    assert results["large"] == ""


def test_a_replay_with_other_inputs_is_right_on_the_same_workspaces(results) -> None:
    assert results["replay"] == [[True, True], 0]
