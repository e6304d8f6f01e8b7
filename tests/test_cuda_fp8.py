"""The CUDA kernels of `fp8_gemm` and `fp8_quantize`: corners of their spaces, and odd problems."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.kernels.cuda.fp8_gemm import fitted, wgmma
from kernelcat.runtime import gpu, tensor_map
from kernelcat.verify import inspect

H200 = gpu.find("h200")


def gemm(m: int, n: int, k: int) -> Problem:
    return catalog.entry("fp8_gemm").problem(M=m, N=n, K=k, dtype="float8_e4m3fn")


def quantize(m: int, k: int, block: str, dtype: str = "bfloat16") -> Problem:
    return catalog.entry("fp8_quantize").problem(M=m, K=k, block=block, dtype=dtype)


def config(tile: str, **chosen: int | str | bool) -> Config:
    usual = {"swap": False, "cluster": "1x1", "overlap": "free", "split_k": 1}
    return Config(usual | {"tile": tile} | chosen)


LARGE = gemm(4096, 7168, 2048)
CORNERS = [
    # Two wgmmas for each warpgroup; the widest tile; two scales of B for each tile; three
    # warpgroups; a split tail.
    (LARGE, config("256x128", overlap="turns", cluster="1x2")),
    (LARGE, config("128x192", overlap="turns", cluster="2x1")),
    (LARGE, config("128x160")),
    (LARGE, config("192x128")),
    (gemm(1100, 4096, 7168), config("128x128", overlap="ahead", cluster="2x1", split_k=2)),
    # Rows of B: the most scales, two sets of accumulators, three warpgroups, the narrowest tile.
    (gemm(100, 2112, 7168), config("128x128", swap=True, overlap="turns", split_k=2)),
    (gemm(64, 2112, 7168), config("64x64", swap=True, overlap="ahead", split_k=4)),
    (gemm(16, 7168, 2048), config("192x16", swap=True)),
]
FITTED_CORNERS = [CORNERS[4], CORNERS[5]]
ODD = [
    gemm(1, 1, 16),
    gemm(1, 257, 272),
    gemm(33, 5, 144),
    gemm(400, 1, 592),
    gemm(1 << 20, 16, 16),
    gemm(3, 1 << 20, 32),
    gemm(4097, 5000, 2064),
    gemm(5, 3, 0),
    gemm(5, 3, 7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "corners"), [(wgmma, CORNERS), (fitted, FITTED_CORNERS)])
def test_corners_of_the_space_compile_without_spills_and_prove_their_techniques(
    variant: Any, corners: list[tuple[Problem, Config]]
) -> None:
    built = []
    for problem, chosen in corners:
        assert variant.IMPLEMENTATION.why_not(chosen, problem, H200) is None
        (step,) = variant.IMPLEMENTATION.program(problem, chosen, H200).steps
        artifact = build(step.source, H200.arch)
        assert artifact.metadata["spill_bytes"] == 0
        assert artifact.metadata["warnings"] == []  # ptxas would warn here of serialized wgmma
        assert step.shared_bytes <= H200.shared_bytes
        assert step.block * artifact.metadata["registers"] <= 1 << 16
        built.append((step, artifact))
    reports = inspect.inspect_all([artifact for _, artifact in built])
    for (step, _), report, (_, chosen) in zip(built, reports, corners, strict=True):
        assert all(inspect.proofs(variant.IMPLEMENTATION, [report]).values()), chosen
        assert report.has("UTMALDG*MULTICAST") == (step.cluster[0] > 1), chosen


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_every_program_of_an_odd_problem_can_be_launched(problem: Problem) -> None:
    legal = list(wgmma.IMPLEMENTATION.configs(problem, H200))
    assert bool(legal) == (problem["K"] % 16 == 0 and problem["K"] > 0)
    for chosen in legal:
        program = wgmma.IMPLEMENTATION.program(problem, chosen, H200)
        (step,) = program.steps
        assert 0 < step.grid[0] <= H200.sms and step.grid[0] % step.cluster[0] == 0
        assert step.shared_bytes <= H200.shared_bytes
        maps = [param for param in step.params if isinstance(param, TensorMap)]
        assert [tensor_map.why_not(param) for param in maps] == [None, None]
        # The boxes of the thread blocks that share a tile cover it, in whole atoms of the swizzle.
        plan = wgmma.Plan.of(chosen, problem, H200)
        assert maps[0].box[1] * plan.cluster_n == plan.block_m and maps[0].box[1] % 8 == 0
        assert maps[1].box[1] * plan.cluster_m == plan.block_n and maps[1].box[1] % 8 == 0
        assert [m.tensor for m in maps] == (["b", "a"] if chosen["swap"] else ["a", "b"])
    if legal:
        assert wgmma.IMPLEMENTATION.default(problem, H200) in legal


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_boxes_of_last_tiles_end_with_their_operand(problem: Problem) -> None:
    for chosen in fitted.IMPLEMENTATION.configs(problem, H200):
        (step,) = fitted.IMPLEMENTATION.program(problem, chosen, H200).steps
        maps = [param for param in step.params if isinstance(param, TensorMap)]
        assert [tensor_map.why_not(param) for param in maps] == [None] * 4
        for whole, edge in zip(maps[::2], maps[1::2], strict=True):
            rows, part = whole.shape[1], whole.box[1]
            assert edge.box[1] % 8 == 0 and 0 < edge.box[1] <= part
            assert (rows + 7) // 8 * 8 % part in (0, edge.box[1])


@pytest.mark.parametrize("shape", [(16, 7168, 2048), (64, 2112, 7168), (1100, 4096, 1648)])
def test_splits_have_work_workspaces_and_at_most_one_wave(shape: tuple[int, int, int]) -> None:
    problem = gemm(*shape)
    splits = set()
    for chosen in wgmma.IMPLEMENTATION.configs(problem, H200):
        plan = wgmma.Plan.of(chosen, problem, H200)
        workspaces = wgmma.IMPLEMENTATION.program(problem, chosen, H200).workspaces
        splits.add(plan.split_k)
        if plan.split_k == 1:
            assert plan.num_work_items == plan.num_tiles and not workspaces
            continue
        num_splits = (plan.num_tiles - plan.num_whole_tiles) * plan.split_k
        assert 0 < num_splits == plan.num_work_items - plan.num_whole_tiles <= plan.num_clusters
        assert plan.num_whole_tiles % plan.num_clusters == 0 and plan.split_k <= plan.num_k_blocks
        tile_bytes = plan.block_m * plan.block_n * 4
        assert workspaces["partials"] == num_splits * plan.cluster_size * tile_bytes
    assert len(splits) > 2


def test_small_m_swaps_operands_and_large_m_takes_clusters() -> None:
    small_m = wgmma.IMPLEMENTATION.default(gemm(16, 7168, 2048), H200)
    large_m = wgmma.IMPLEMENTATION.default(gemm(8192, 8192, 8192), H200)
    assert small_m["swap"] and small_m["tile"].endswith("x16")
    assert not large_m["swap"] and large_m["cluster"] != "1x1"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.slow
def test_quantizing_compiles_with_and_without_conversion_instructions(arch: str) -> None:
    artifacts = []
    for variant, block in itertools.product(("naive", "vectorized"), ("1x128", "128x128")):
        implementation = catalog.implementation("fp8_quantize", "cuda", variant)
        problem = quantize(300, 264, block, "float16")
        (step,) = implementation.program(problem, implementation.default(problem, H200), H200).steps
        artifacts.append(build(step.source, arch))
        assert artifacts[-1].metadata["spill_bytes"] == 0
    has_instruction = [report.has("F2FP*E4M3") for report in inspect.inspect_all(artifacts)]
    assert has_instruction == 4 * [arch == "sm_90a"]


@pytest.mark.parametrize(("m", "k"), [(1, 8), (1, 1), (17, 136), (300, 260), (1 << 24, 128)])
@pytest.mark.parametrize("block", ["1x128", "128x128"])
def test_quantizing_covers_every_row_and_column(m: int, k: int, block: str) -> None:
    implementation, problem = (
        catalog.implementation("fp8_quantize", "cuda", "vectorized"),
        quantize(m, k, block),
    )
    legal = list(implementation.configs(problem, H200))
    assert implementation.default(problem, H200) in legal
    for chosen in legal:
        (step,) = implementation.program(problem, chosen, H200).steps
        assert step.grid[0] == -(-m // (16 * chosen["unroll"])) * -(-k // 128)


def test_an_empty_problem_launches_nothing() -> None:
    empty = (gemm(0, 5, 16), gemm(5, 0, 16), quantize(0, 8, "1x128"), quantize(5, 0, "128x128"))
    for problem in empty:
        for implementation in catalog.in_language(problem.entry, "cuda"):
            for chosen in implementation.configs(problem, H200):
                assert implementation.program(problem, chosen, H200).steps == ()
