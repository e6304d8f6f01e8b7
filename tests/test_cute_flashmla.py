"""CuTe's `flashmla`: spaces that serve, programs that add up, products that are not serialized."""

from __future__ import annotations

import random

import pytest
from campaign import only_in_campaigns

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config
from kernelcat.reference.flashmla import PACKED_TYPE, latent
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

H200 = gpu.find("h200")
SPLIT = catalog.implementation("flashmla", "cute", "split")
WGMMA = catalog.implementation("flashmla", "cute", "wgmma")
PROBLEMS = catalog.entry("flashmla").problems


def test_spaces_stay_small_and_defaults_are_legal() -> None:
    dice = random.Random(0)
    for _ in range(200):
        q_len, dtype = dice.randint(1, 4), dice.choice(["bfloat16", "float16"])
        problem = latent(
            dice.choice([1, 2, 16, 128, 400]), q_len, dice.choice([1, 8, 16, 64, 100, 128]),
            dice.choice([q_len, 64, 1000, 32768]), dice.choice([1, 16, 64, 128]), dtype=dtype,
            kv_dtype=dice.choice([dtype, PACKED_TYPE]),
        )  # fmt: skip
        assert any(True for _ in SPLIT.configs(problem, H200))
        for implementation in (SPLIT, WGMMA):
            configs = list(implementation.configs(problem, H200))
            assert len(configs) <= 40
            assert (implementation.default(problem, H200) in configs) == bool(configs)
            for config in configs:
                assert implementation.estimate(problem, config, H200) > 0
                for step in implementation.program(problem, config, H200).steps:
                    assert len(step.source.params) == len(step.params)
                    assert step.grid[0] % step.cluster[0] == 0


def test_a_split_sequence_is_combined_by_a_second_kernel() -> None:
    problem = PROBLEMS["1x1-128-4096"]
    program = WGMMA.program(problem, WGMMA.default(problem, H200), H200)
    kernels = [step.source.kernel for step in program.steps]
    assert kernels == ["flashmla.wgmma:Wgmma", "flashmla.combine:Combine"]
    assert program.steps[1].grid == (problem["heads"], problem["tokens"], 1)
    assert not WGMMA.program(
        PROBLEMS["128x1-128-4096"], Config(cluster=1, scores_first=False, splits=1), H200
    ).workspaces


@pytest.mark.parametrize(
    ("name", "scores_first"),
    [
        ("128x1-128-4096", True),
        ("128x1-128-4096-fp8", False),
        *only_in_campaigns([("128x1-128-4096", False), ("128x1-128-4096-fp8", True)]),
    ],
)
def test_products_are_under_way_together(name: str, scores_first: bool) -> None:
    """A compiler that cannot follow accumulators waits after every product."""
    config = Config(WGMMA.default(PROBLEMS[name], H200), scores_first=scores_first)
    artifact = jit.build(WGMMA.program(PROBLEMS[name], config, H200).steps[0].source, "sm_90a")
    opcodes = inspect.inspect(artifact).opcodes
    products = sum(count for opcode, count in opcodes.items() if opcode.startswith("HGMMA"))
    assert artifact.metadata["spill_bytes"] == 0
    assert 10 * opcodes["WARPGROUP.DEPBAR.LE"] < products


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("128x1-16-4096", Config(block_n=64, warps=8, stages=2, splits=1)),
        ("128x1-16-4096-fp8", Config(block_n=32, warps=4, stages=5, splits=2)),
    ],
)
def test_few_heads_compile_without_spills(name: str, config: Config) -> None:
    assert SPLIT.why_not(config, PROBLEMS[name], H200) is None
    (step, *_) = SPLIT.program(PROBLEMS[name], config, H200).steps
    assert jit.build(step.source, "sm_90a").metadata["spill_bytes"] == 0


def test_a_tile_of_small_pages_is_loaded_page_by_page() -> None:
    config, loads = Config(cluster=1, scores_first=False, splits=1), {}
    for page_size in (16, 64):
        problem = latent(2, 40, 16, 480, page_size)
        assert WGMMA.why_not(config, problem, H200) is None
        artifact = jit.build(WGMMA.program(problem, config, H200).steps[0].source, "sm_90a")
        opcodes = inspect.inspect(artifact).opcodes
        loads[page_size] = sum(n for opcode, n in opcodes.items() if opcode.startswith("UTMALDG"))
    pieces = loads[64] // 2  # of a tile of queries, and of one of tokens
    assert loads == {64: 2 * pieces, 16: pieces + 4 * pieces}


def test_pages_that_tma_cannot_load_are_refused() -> None:
    one, two = (Config(cluster=n, scores_first=False, splits=1) for n in (1, 2))
    assert "TMA loads 16" in WGMMA.why_not(one, latent(2, 40, 16, 480, 1), H200)
    assert "cluster" in WGMMA.why_not(two, latent(2, 40, 16, 480, 16), H200)
