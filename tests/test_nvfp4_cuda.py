"""CUDA's `nvfp4_matmul`: corners of its spaces, parameters of launches, and decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Int32, Int64, Pointer, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.kernels.cuda.nvfp4_matmul import mma, naive, wgmma
from kernelcat.reference.nvfp4_matmul import FORMATS, FP4, FP8, PACKINGS, product
from kernelcat.runtime import gpu, tensor_map
from kernelcat.verify import inspect

H200, B200, A100 = map(gpu.find, ("h200", "b200", "a100"))
HALF, MXFP4 = {"dtype": "float16"}, {"format": "mxfp4"}
WIDTHS = {TensorMap: 128, Int32: 4}
"""Bytes of each kind of parameter, except pointers and 64-bit integers, which have 8."""


def tiles(m: int, n: int, k: int, **axes: bool | str) -> Problem:
    return product(m, n, k, packing="tiles", bias=True, **axes)


def streams(row_tiles: int, warp_rows: int, cluster: int) -> Config:
    return Config(row_tiles=row_tiles, warp_rows=warp_rows, cluster=cluster)


CORNERS = [
    # Small M with many loads in flight; the most thread blocks for each SM; the largest accumulator
    # of a warp, in 255 registers.
    ("mma", tiles(1, 8192, 8192), streams(2, 1, 1)),
    ("mma", tiles(16, 8192, 8192, **HALF), streams(1, 1, 2)),
    ("mma", tiles(24, 8192, 8192, activation="swiglu"), streams(1, 2, 8)),
    ("mma", tiles(16, 8192, 8192), streams(2, 1, 2)),
    ("mma", tiles(32, 4096, 4096, dtype=FP8, activation="gelu"), streams(2, 4, 8)),
    ("mma", tiles(64, 4096, 4096, **MXFP4, activation="swiglu"), streams(2, 4, 8)),
    ("mma", tiles(16, 4096, 4096, **MXFP4, **HALF), streams(2, 4, 8)),
    # The largest accumulator; clusters that split K; the most stages; float8, which adds a step.
    ("wgmma", tiles(8192, 8192, 8192), Config(tile="128x256", split_k=1)),
    ("wgmma", tiles(300, 4096, 4096, **MXFP4, activation="swiglu"),
     Config(tile="128x192", split_k=1)),
    ("wgmma", tiles(100, 2880, 2880, **MXFP4, activation="swiglu"),
     Config(tile="128x128", split_k=3)),
    ("wgmma", tiles(200, 4096, 4096, **HALF, activation="gelu"),
     Config(tile="128x128", split_k=2)),
    ("wgmma", tiles(64, 4096, 4096, dtype=FP8, activation="silu"),
     Config(tile="128x64", split_k=4)),
    ("wgmma", tiles(300, 4096, 4096, **MXFP4, **HALF), Config(tile="128x192", split_k=1)),
    # Widths that are no power of two: of one group more than a warp's tile, and the widest ones.
    ("wgmma", tiles(272, 1280, 2880, **MXFP4), Config(tile="128x144", split_k=5)),
    ("wgmma", tiles(150, 1280, 2880, activation="swiglu"), Config(tile="128x160", split_k=3)),
    ("wgmma", tiles(5080, 2048, 10944, **HALF), Config(tile="128x208", split_k=1)),
    ("wgmma", tiles(7211, 2048, 4096), Config(tile="128x224", split_k=1)),
]  # fmt: skip
ODD = [
    tiles(1, 1, 16),
    tiles(1, 257, 272),
    tiles(33, 5, 144),
    tiles(400, 1, 592),
    tiles(3, 1 << 20, 32, **MXFP4),
    tiles(64, 7168, 18432),
    tiles(4097, 5000, 2064, dtype=FP8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "problem", "config"), CORNERS)
def test_a_corner_compiles_without_spills_and_gets_the_parameters_it_declares(
    variant: str, problem: Problem, config: Config
) -> None:
    implementation = catalog.implementation("nvfp4_matmul", "cuda", variant)
    assert implementation.why_not(config, problem, H200) is None
    program = implementation.program(problem, config, H200)
    for step in program.steps:
        artifact = build(step.source, H200.arch)
        assert artifact.metadata["spill_bytes"] == 0
        assert artifact.metadata["warnings"] == []  # ptxas would warn here of serialized wgmma
        assert step.shared_bytes <= H200.shared_bytes
        assert step.block * artifact.metadata["registers"] <= 1 << 16
        declared_bytes = [WIDTHS.get(type(param), 8) for param in step.params]
        assert inspect.parameters(artifact.cubin, artifact.kernel) == declared_bytes
        maps = [param for param in step.params if isinstance(param, TensorMap)]
        assert all(tensor_map.why_not(tma_map) is None for tma_map in maps)
    artifact = build(program.steps[-1].source, H200.arch)
    assert all(inspect.prove(implementation, artifact).values())
    # Thread blocks of a cluster send partial sums to each other by STAS.
    blocks = config["cluster" if variant == "mma" else "split_k"]
    assert inspect.inspect(artifact).has("STAS") == (blocks > 1)


@pytest.mark.slow
@pytest.mark.parametrize("problem", [tiles(8, 4096, 4096), tiles(8, 4096, 4096, **MXFP4)], ids=str)
def test_mma_compiles_for_blackwell_and_naive_for_ampere(problem: Problem) -> None:
    (step,) = mma.IMPLEMENTATION.program(problem, streams(2, 1, 2), B200).steps
    artifact = build(step.source, B200.arch)
    assert artifact.metadata["spill_bytes"] == 0
    assert all(inspect.prove(mma.IMPLEMENTATION, artifact).values())
    (step,) = naive.IMPLEMENTATION.program(problem, Config(), A100).steps
    assert build(step.source, A100.arch).metadata["spill_bytes"] == 0


@pytest.mark.slow
def test_the_number_of_instructions_that_decode_a_tile() -> None:
    """An SM of an H200 can issue 130 instructions in the time that a tile of 16 x 64 is loaded."""
    problem = tiles(1, 8192, 8192)
    (step,) = mma.IMPLEMENTATION.program(problem, streams(2, 1, 1), H200).steps
    opcodes = inspect.inspect(build(step.source, H200.arch)).opcodes
    count = dict.fromkeys(("HMMA", "HMUL2", "PRMT", "SHFL"), 0)
    for opcode, times in opcodes.items():
        name = opcode.partition(".")[0]
        if name in count:
            count[name] += times
    decoded = 8  # tiles in the loop: four columns of two
    assert count["HMMA"] == 4 * decoded
    # One product for each register, and two for each pair of scales, of which a lane decodes an
    # eighth of a tile.
    assert count["HMUL2"] == 16 * decoded + 2 * 8
    # HMUL2 reads a scale from one half of a register: no PRMT copies the scale to both halves.
    assert count["PRMT"] < 2 * decoded
    assert 4 * decoded <= count["SHFL"] <= 4 * decoded + 4


@pytest.mark.parametrize("problem", ODD, ids=str)
@pytest.mark.parametrize("sms", [1, 7, 132])
def test_every_program_of_an_odd_problem_can_be_launched(problem: Problem, sms: int) -> None:
    target = replace(H200, sms=sms)
    for implementation in (mma.IMPLEMENTATION, wgmma.IMPLEMENTATION):
        legal = list(implementation.configs(problem, target))
        fits_mma = problem["M"] <= mma.MAX_ROWS and problem["K"] < 18432
        served = fits_mma or implementation is wgmma.IMPLEMENTATION
        assert bool(legal) == served and len(legal) <= 30
        for config in legal:
            program = implementation.program(problem, config, target)
            step = program.steps[-1]
            assert step.grid[0] > 0 and step.grid[0] % step.cluster[0] == 0
            assert step.shared_bytes <= target.shared_bytes
            maps = [param for param in step.params if isinstance(param, TensorMap)]
            assert [tensor_map.why_not(tma_map) for tma_map in maps] == [None] * len(maps)
            assert implementation.estimate(problem, config, target) > 0
        if legal:
            assert implementation.default(problem, target) in legal


@pytest.mark.parametrize("m", [1, 5, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (2880, 2880), (8192, 8192), (400, 7168)])
def test_slices_cover_k_and_all_clusters_are_resident(m: int, n: int, k: int) -> None:
    problem = tiles(m, n, k)
    for config in mma.IMPLEMENTATION.configs(problem, H200):
        plan = mma.Plan.of(config, problem, H200)
        assert plan.slice_tiles * plan.slices * plan.cluster >= plan.k_tiles
        assert plan.units * plan.unit_tiles >= plan.rows
        assert 8 * plan.col_tiles >= m > 4 * plan.col_tiles or plan.col_tiles == 1
        # Every thread block must finish a part of a unit: that is its only wait for the others.
        assert plan.quads >= plan.cluster
        assert plan.residents(H200) * plan.warps >= 16 or plan.has_many_sums
        blocks = plan.clusters(H200) * plan.cluster
        assert blocks <= H200.sms * plan.residents(H200) and plan.residents(H200) > 0


def test_the_bytes_of_a_stage_are_those_of_the_kernel() -> None:
    for problem, weights in ((tiles(64, 256, 512), 9216), (tiles(64, 256, 512, **MXFP4), 9216)):
        for tile in wgmma.SPACE["tile"]:
            config = Config(tile=tile, split_k=1)
            plan = wgmma.Plan.of(config, problem, H200)
            assert plan.stage_bytes == 256 * plan.block_n + weights
            assert plan.num_stages(H200) >= wgmma.MIN_STAGES
            assert plan.shared_bytes(H200) <= H200.shared_bytes


def test_tiles_are_as_narrow_as_their_number_allows_and_end_with_a_whole_group() -> None:
    """A wider tile of which as many are needed only multiplies zeros."""
    implementation, plain = wgmma.IMPLEMENTATION, tiles(272, 1280, 2880)
    found = {config["tile"] for config in implementation.configs(plain, H200)}
    assert found == {"128x64", "128x80", "128x96", "128x144"}
    swiglu = tiles(272, 1280, 2880, activation="swiglu")
    found = {config["tile"] for config in implementation.configs(swiglu, H200)}
    assert found == {"128x64", "128x96", "128x160"}
    why = implementation.why_not(Config(tile="128x144", split_k=1), swiglu, H200)
    assert why == "144 rows of A are no whole groups of 32"


def test_float8_rows_become_bfloat16_in_a_workspace() -> None:
    problem = tiles(100, 256, 512, dtype=FP8)
    program = wgmma.IMPLEMENTATION.program(problem, Config(tile="128x128", split_k=1), H200)
    widen, multiply = program.steps
    assert program.workspaces["wide"] == 2 * 100 * 512
    assert Int64(100 * 512 // 16) in widen.params
    rows, codes, scales = (param for param in multiply.params if isinstance(param, TensorMap))
    assert (rows.tensor, rows.dtype, rows.shape) == ("wide", "bfloat16", (512, 100))
    # 32-bit words of 16 tile rows: 128 words of codes and 16 words of scales for each tile.
    assert (codes.tensor, codes.shape, codes.box) == ("w", (8 * 128, 16), (256, 8))
    assert (scales.tensor, scales.shape, scales.box) == ("w_scale", (8 * 16, 16), (32, 8))


@pytest.mark.parametrize(("m", "n", "k"), [(64, 2880, 2880), (32, 4096, 4096), (300, 400, 18432)])
def test_splits_of_k_are_one_wave_of_clusters(m: int, n: int, k: int) -> None:
    problem, splits = tiles(m, n, k), set()
    for config in wgmma.IMPLEMENTATION.configs(problem, H200):
        (step,) = wgmma.IMPLEMENTATION.program(problem, config, H200).steps
        plan = wgmma.Plan.of(config, problem, H200)
        splits.add(plan.split_k)
        assert step.cluster == (plan.split_k, 1, 1) and step.grid[0] <= H200.sms
        # A thread block receives partial sums only once, so a cluster computes one tile.
        assert plan.split_k == 1 or step.grid[0] == plan.tiles * plan.split_k
    assert len(splits) > 2


def test_illegal_problems_have_a_reason() -> None:
    rows, half = product(1, 256, 512), tiles(1, 256, 512, **MXFP4, **HALF)
    for implementation in (mma.IMPLEMENTATION, wgmma.IMPLEMENTATION):
        config = implementation.default(rows, H200)
        assert "prepack" in (implementation.why_not(config, rows, H200) or "")
        assert implementation.why_not(config, tiles(1, 256, 512), A100) is not None
    many = tiles(65, 256, 512)
    assert "65 rows" in (mma.IMPLEMENTATION.why_not(streams(1, 1, 1), many, H200) or "")
    assert naive.IMPLEMENTATION.why_not(Config(), half, A100) is None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("target", [A100, H200, B200], ids=lambda target: target.sku)
def test_a_in_4_bits_is_illegal_in_every_cuda_kernel(
    target: gpu.Gpu, format: str, packing: str
) -> None:
    for m in (0, 1, 64, 8192):
        problem = product(m, 4096, 4096, dtype=FP4, format=format, packing=packing)
        for implementation in catalog.in_language("nvfp4_matmul", "cuda"):
            assert list(implementation.configs(problem, target)) == []
            config = implementation.default(problem, target)
            assert implementation.illegal(config, problem, target) == (
                "A in 4 bits is not decoded here: it is for tensor cores that take it"
            )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", FP8])
def test_a_launch_passes_the_tensors_of_the_problem(dtype: str) -> None:
    """No kernel has a parameter for the block scales of A in 4 bits."""
    entry, problem = catalog.entry("nvfp4_matmul"), tiles(33, 256, 512, dtype=dtype)
    inputs, always = {t.name for t in entry.present(problem)}, {"global_scale", "a_scale", "bias"}
    for implementation in catalog.in_language("nvfp4_matmul", "cuda"):
        config = implementation.default(problem, H200)
        program = implementation.program(problem, config, H200)
        passed = {
            param.tensor
            for step in program.steps
            for param in step.params
            if isinstance(param, (Pointer, TensorMap))
        }
        assert inputs | always == passed - set(program.workspaces)


def test_an_empty_problem_launches_nothing() -> None:
    for problem in (tiles(0, 16, 64), tiles(5, 0, 64)):
        for implementation in catalog.in_language("nvfp4_matmul", "cuda"):
            config = implementation.default(problem, H200)
            assert implementation.program(problem, config, H200).steps == ()
