"""The CUDA kernels of `gemm` and `tma_copy`: corners of their spaces, and odd problems.

`test_compiles` tests the default of one problem.
"""

from __future__ import annotations

from math import ceil

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.kernels.cuda.common.persistent import loaded_rows
from kernelcat.kernels.cuda.gemm import wgmma
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.kernels.cuda.tma_copy import Boxes, Layout
from kernelcat.runtime import gpu, tensor_map
from kernelcat.verify import inspect

SKU_OF = {"sm_80": "a100", "sm_90a": "h200", "sm_100a": "b200"}


def gemm(
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    activation: str = "none",
    residual: bool = False,
) -> Problem:
    return catalog.entry("gemm").problem(
        M=m, N=n, K=k, dtype=dtype, bias=True, activation=activation, residual=residual
    )


def copy(rows: int, cols: int, src: int = 0, dst: int = 0, dtype: str = "bfloat16") -> Problem:
    strides = {"src_stride": src or cols, "dst_stride": dst or src or cols}
    return catalog.entry("tma_copy").problem(rows=rows, cols=cols, dtype=dtype, **strides)


def wgmma_config(
    tile: str,
    schedule: str = "cooperative",
    *,
    cluster: str = "1x1",
    split_k: int = 1,
    swap: bool = False,
) -> Config:
    """A configuration of `wgmma`.  The small tiles listed here are legal only with ``swap``."""
    swap |= tile in ("64x16", "64x32", "64x48", "64x64", "128x16", "128x64")
    return Config(tile=tile, schedule=schedule, swap=swap, cluster=cluster, split_k=split_k)


RING = Config(tile_kb=16, num_stages=8, blocks_per_sm=1, evict_first=True)
CORNERS = [
    # The largest accumulators, both kinds of stores, both schedules, clusters, every epilogue.
    ("sm_90a", "gemm", "wgmma", gemm(4096, 4096, 4096), wgmma_config("128x256")),
    ("sm_90a", "gemm", "wgmma", gemm(4097, 5001, 2056, "float16"), wgmma_config("128x256")),
    ("sm_90a", "gemm", "wgmma", gemm(1024, 5120, 2880), wgmma_config("256x160")),
    ("sm_90a", "gemm", "wgmma", gemm(8192, 8192, 8192), wgmma_config("256x192", cluster="1x2")),
    (
        *("sm_90a", "gemm", "wgmma", gemm(4097, 5000, 2056)),
        wgmma_config("256x160", cluster="1x2", swap=True),
    ),
    # Three consumers, and widths that are no multiple of 32.
    ("sm_90a", "gemm", "wgmma", gemm(775, 5120, 4096), wgmma_config("192x192")),
    (
        *("sm_90a", "gemm", "wgmma", gemm(775, 5120, 4096, activation="swiglu", residual=True)),
        wgmma_config("192x144", swap=True, cluster="2x1"),
    ),
    (
        *("sm_90a", "gemm", "wgmma", gemm(600, 4096, 4096)),
        wgmma_config("192x176", cluster="1x2", split_k=2),
    ),
    ("sm_90a", "gemm", "wgmma", gemm(600, 4096, 4096), wgmma_config("256x144")),
    ("sm_90a", "gemm", "wgmma", gemm(600, 4096, 4096), wgmma_config("128x208", cluster="2x1")),
    (
        "sm_90a",
        "gemm",
        "wgmma",
        gemm(4096, 24576, 1536, activation="gelu"),
        wgmma_config("128x192", "pingpong", cluster="2x1"),
    ),
    (
        "sm_90a",
        "gemm",
        "wgmma",
        gemm(4096, 4096, 4096, activation="swiglu", residual=True),
        wgmma_config("128x256", cluster="2x1"),
    ),
    (
        "sm_90a",
        "gemm",
        "wgmma",
        gemm(64, 2112, 7168, "float16", "swiglu", True),
        wgmma_config("64x64", split_k=4),
    ),
    ("sm_90a", "gemm", "wgmma", gemm(1, 2880, 4096), wgmma_config("128x16", split_k=4)),
    ("sm_90a", "gemm", "wgmma", gemm(9, 2884, 4096, activation="swiglu"), wgmma_config("64x16")),
    ("sm_90a", "gemm", "tma", gemm(99, 99, 64), Config(block_m=128, block_n=128, num_stages=6)),
    ("sm_100a", "gemm", "tma", gemm(9, 99, 64), Config(block_m=32, block_n=64, num_stages=3)),
    ("sm_80", "gemm", "tiled", gemm(99, 99, 99), Config(block_m=128, block_n=128, num_stages=4)),
    ("sm_90a", "gemm", "tiled", gemm(99, 99, 99), Config(block_m=128, block_n=64, num_stages=3)),
    ("sm_80", "gemm", "naive", gemm(3, 3, 3, "float16"), Config()),
    ("sm_80", "tma_copy", "vectorized", copy(9, 9), Config(unroll=4, streaming=True)),
    ("sm_90a", "tma_copy", "vectorized", copy(9, 9), Config(unroll=4, streaming=False)),
    ("sm_100a", "tma_copy", "bulk", copy(1, 1 << 20), RING),
    ("sm_100a", "tma_copy", "tensor_map", copy(99, 80, 96), RING),
]
ODD_PROBLEMS = [
    gemm(1, 1, 8),
    gemm(1, 257, 264),
    gemm(400, 1, 600),
    gemm(63, 40, 1024),
    gemm(1 << 20, 16, 8),
    gemm(5, 3, 0),
    gemm(5, 3, 7),
    copy(1, 1),
    copy(1, 511),
    copy(1, 513),
    copy(1, (1 << 32) + 5),
    copy(3, 5, 8),
    copy(300, 3000, 4096, 3000),
    copy(300, 3, 48, 16, "uint8"),
    copy(7, 33, 36, 40, "float32"),
]


def programs(problem: Problem) -> list[tuple[Implementation, gpu.Gpu, Config, Program]]:
    """Every program of every CUDA implementation, on the SKUs of SKU_OF."""
    return [
        (implementation, target, config, implementation.program(problem, config, target))
        for implementation in catalog.in_language(problem.entry, "cuda")
        for target in map(gpu.find, SKU_OF.values())
        for config in implementation.configs(problem, target)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", SKU_OF)
def test_corners_of_the_space_compile_without_spills_and_prove_their_techniques(arch: str) -> None:
    target, built = gpu.find(SKU_OF[arch]), []
    for _, entry, variant, problem, config in (corner for corner in CORNERS if corner[0] == arch):
        implementation = catalog.implementation(entry, "cuda", variant)
        assert implementation.why_not(config, problem, target) is None
        (step,) = implementation.program(problem, config, target).steps
        artifact = build(step.source, arch)
        assert artifact.metadata["spill_bytes"] == 0
        assert artifact.metadata["warnings"] == []  # ptxas would warn here of serialized wgmma
        assert step.shared_bytes + artifact.metadata["static_shared_bytes"] <= target.shared_bytes
        assert step.block * artifact.metadata["registers"] <= 1 << 16
        built.append((implementation, config, artifact))
    reports = inspect.inspect_all([artifact for _, _, artifact in built])
    for (implementation, config, _), report in zip(built, reports, strict=True):
        proven = inspect.proofs(implementation, [report])
        if config.get("swap") and config["tile"].startswith("64x"):
            # A single consumer warpgroup does not reallocate registers.
            del proven["register reallocation"]
        assert all(proven.values()), (implementation.name, config, proven)


@pytest.mark.parametrize("problem", ODD_PROBLEMS, ids=str)
def test_every_program_of_an_odd_problem_can_be_launched(problem: Problem) -> None:
    cases = programs(problem)
    assert {i.variant for i, *_ in cases} >= {"naive", "tiled"} or problem.entry == "tma_copy"
    assert {i.variant for i, *_ in cases} >= {"vectorized"} or problem.entry == "gemm"
    for implementation, target, config, program in cases:
        for step in program.steps:
            assert 0 < step.grid[0] < 1 << 31 and 0 < step.grid[1] < 1 << 16
            assert step.shared_bytes <= target.shared_bytes
            for param in step.params:
                if isinstance(param, TensorMap):
                    assert tensor_map.why_not(param) is None, (implementation.name, config)


@pytest.mark.parametrize("problem", ODD_PROBLEMS, ids=str)
def test_a_default_is_legal_wherever_a_configuration_is(problem: Problem) -> None:
    for implementation in catalog.in_language(problem.entry, "cuda"):
        for target in map(gpu.find, SKU_OF.values()):
            legal = list(implementation.configs(problem, target))
            assert not legal or implementation.default(problem, target) in legal


@pytest.mark.parametrize("problem", [gemm(0, 5, 8), gemm(5, 0, 8), copy(0, 5), copy(5, 0)], ids=str)
def test_an_empty_problem_launches_nothing(problem: Problem) -> None:
    assert all(program.steps == () for *_, program in programs(problem))


@pytest.mark.parametrize("problem", [p for p in ODD_PROBLEMS if p.entry == "tma_copy"], ids=str)
@pytest.mark.parametrize("tile_kb", [4, 16])
def test_boxes_and_tails_cover_a_layout_once(problem: Problem, tile_kb: int) -> None:
    layout = Layout.of(problem)
    if layout.row_bytes < 16 or (layout.rows == 1 and layout.bytes < 1024):
        pytest.skip("such short rows have no tensor map")
    boxes = Boxes.of(layout, tile_kb << 10)
    assert boxes.rows * boxes.cols * 4 + boxes.tail_rows * boxes.tail_bytes == layout.bytes
    assert boxes.cols * 4 % 16 == 0, "a TMA store writes whole units of 16 bytes"
    assert boxes.box_bytes <= tile_kb << 10
    assert boxes.box_cols * boxes.boxes_per_row >= boxes.cols
    assert boxes.box_rows * (boxes.num_boxes // boxes.boxes_per_row) >= boxes.rows
    assert boxes.rows * boxes.boxes_per_row * boxes.box_cols < 1 << 62
    assert boxes.rows < 1 << 31 and boxes.cols < 1 << 31  # a box's coordinates are 32-bit


@pytest.mark.parametrize("shape", [(16, 7168, 2048), (64, 2112, 7168), (8, 2880, 4096)])
def test_splits_have_work_workspaces_and_at_most_one_wave(shape: tuple[int, int, int]) -> None:
    target, problem = gpu.find("h200"), gemm(*shape)
    splits = set()
    for config in wgmma.IMPLEMENTATION.configs(problem, target):
        program = wgmma.IMPLEMENTATION.program(problem, config, target)
        split_k, plan = config["split_k"], Plan.of(config, problem, target)
        splits.add(split_k)
        blocks = ceil(problem["K"] / 64)
        shares = [blocks * (s + 1) // split_k - blocks * s // split_k for s in range(split_k)]
        assert min(shares) > 0 and sum(shares) == blocks
        if split_k == 1:
            assert not program.workspaces
            continue
        (step,) = program.steps
        assert step.grid[0] == plan.num_tiles * split_k <= plan.num_clusters
        tile_bytes = plan.block_m * plan.block_n * 4
        assert program.workspaces["partials"] == plan.num_tiles * split_k * tile_bytes
    assert len(splits) > 1


def test_the_tiles_of_a_short_last_wave_are_split() -> None:
    target, problem = gpu.find("h200"), gemm(4096, 4096, 4096)
    config = wgmma_config("128x192", "pingpong", split_k=3)
    assert wgmma.IMPLEMENTATION.why_not(config, problem, target) is None
    plan = Plan.of(config, problem, target)
    assert (plan.num_tiles, plan.num_whole_tiles) == (32 * 22, 5 * 132)
    assert plan.num_work_items == 5 * 132 + 44 * 3 and plan.waves == 5 + 1 / 3
    assert plan.workspaces["partials"] == 44 * 3 * 128 * 192 * 4


def test_wgmma_tiles_follow_the_problem() -> None:
    """Small M takes swapped tiles in as many splits as SMs are free; large M takes large tiles in
    about one wave."""
    target = gpu.find("h200")
    small = wgmma.IMPLEMENTATION.default(gemm(64, 2112, 7168), target)
    large = wgmma.IMPLEMENTATION.default(gemm(4096, 4096, 4096), target)
    wave = wgmma.IMPLEMENTATION.default(gemm(1024, 5120, 2880), target)
    assert (small["swap"], small["tile"], small["split_k"]) == (True, "64x64", 4)
    assert not large["swap"]
    block_m, block_n = map(int, large["tile"].split("x"))
    assert block_m * block_n >= 128 * 256 and large["split_k"] == 1
    assert (wave["tile"], wave["split_k"]) == ("256x160", 1)


def test_large_tiles_are_swapped_only_for_fewer_waves() -> None:
    """4097 rows make 17 tiles of 256, 5000 columns 20: 544 or 520 tiles for 132 SMs."""
    target = gpu.find("h200")
    odd, even = gemm(4097, 5000, 2056), gemm(4096, 4096, 4096)
    config = wgmma_config("256x160", swap=True, cluster="1x2")
    assert Plan.of(config, odd, target).waves == 4
    assert wgmma.IMPLEMENTATION.unpromising(config, odd, target) is None
    assert "waves" in (wgmma.IMPLEMENTATION.unpromising(config, even, target) or "")


def test_a_single_resident_thread_block_takes_all_shared_memory() -> None:
    target, problem = gpu.find("h200"), gemm(64, 2880, 4096)
    one_resident, two_resident = (
        Plan.of(wgmma_config("64x64", split_k=s), problem, target) for s in (2, 3)
    )
    assert (one_resident.num_work_items, one_resident.num_stages(target)) == (90, 13)
    assert (two_resident.num_work_items, two_resident.num_stages(target)) == (135, 5)


@pytest.mark.parametrize(
    ("rows", "sharers", "loaded"),
    [(256, 4, 64), (72, 4, 72), (96, 4, 24), (80, 2, 40), (64, 1, 64), (56, 2, 56)],
)
def test_thread_blocks_load_equal_parts_of_whole_atoms_or_take_turns(
    rows: int, sharers: int, loaded: int
) -> None:
    """E.g. four thread blocks need 72 rows, nine atoms: each loads all of every fourth k-block."""
    assert loaded_rows(rows, sharers) == loaded


def test_a_product_of_few_rows_has_clusters_that_share_both_operands() -> None:
    """133 x 2560 x 2880: cuBLAS takes tiles of 64 x 72 in clusters of 4 x 2 on an H100."""
    target, problem = gpu.find("h200"), gemm(133, 2560, 2880)
    config = wgmma_config("64x72", cluster="4x2", swap=True)
    assert wgmma.IMPLEMENTATION.why_not(config, problem, target) is None
    assert config in list(wgmma.IMPLEMENTATION.configs(problem, target))
    plan = Plan.of(config, problem, target)
    assert (plan.num_tiles, plan.is_alone, plan.num_thread_blocks) == (10, True, 80)
    (step,) = wgmma.IMPLEMENTATION.program(problem, config, target).steps
    assert (step.grid, step.cluster) == ((80, 1, 1), (8, 1, 1))
    boxes = [param.box for param in step.params if isinstance(param, TensorMap)]
    assert boxes == [(64, 32), (64, 72), (64, 40)]


def test_clusters_that_do_not_run_at_once_have_two_thread_blocks_on_an_sm() -> None:
    """16 clusters of eight do not fit 132 SMs: with an SM for each, two would wait for the rest."""
    target, problem = gpu.find("h200"), gemm(103, 2048, 4096)
    plan = Plan.of(wgmma_config("64x40", cluster="4x2", swap=True), problem, target)
    assert (plan.num_tiles, plan.is_alone) == (16, False)
    assert plan.shared_bytes(target) < target.shared_bytes // 2


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (1024, 5120, 2880), (8, 2880, 4096)])
def test_a_tune_of_wgmma_tries_at_most_30_configurations(shape: tuple[int, int, int]) -> None:
    configs = list(wgmma.IMPLEMENTATION.configs(gemm(*shape), gpu.find("h200")))
    assert 2 <= len(configs) <= 30


@pytest.mark.parametrize("variant", ["naive", "tiled", "tma", "wgmma"])
def test_a_kernel_gets_the_parameters_it_declares(variant: str) -> None:
    target, problem = gpu.find("h200"), gemm(128, 128, 128, residual=True)
    implementation = catalog.implementation("gemm", "cuda", variant)
    config = implementation.default(problem, target)
    (step,) = implementation.program(problem, config, target).steps
    widths = {TensorMap: 128, Int32: 4}
    declared_bytes = [widths.get(type(param), 8) for param in step.params]
    artifact = build(step.source, target.arch)
    assert inspect.parameters(artifact.cubin, artifact.kernel) == declared_bytes
    sizes = [p.value for p in step.params if isinstance(p, Int32)][:3]
    assert sizes == [128, 128, 128]
