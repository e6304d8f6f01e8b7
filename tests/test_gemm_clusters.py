"""gemm/cuda/wgmma and gemm/cuda/fitted in clusters, and with three consumers, on the host.

Loads and remote arrivals land at random times, so that a stage that is overwritten too early, or
read before it has arrived, gives wrong results.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import cuda_fibers
import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.fitted_maps import edge_rows
from kernelcat.kernels.cuda.gemm import fitted, wgmma
from kernelcat.verify import gate

needs_compiler = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")


def gemm(m: int, n: int, k: int, activation: str = "none", residual: bool = False) -> Problem:
    return catalog.entry("gemm").problem(
        M=m, N=n, K=k, dtype="bfloat16", bias=True, activation=activation, residual=residual
    )


def tiles(tile: str, cluster: str, schedule: str = "cooperative", swap: bool = False) -> Config:
    return Config(tile=tile, cluster=cluster, schedule=schedule, swap=swap, split_k=1)


FOUR_BY_TWO = gemm(130, 300, 1000), tiles("64x72", "4x2", swap=True), 16
"""72 rows of A are nine atoms: the four rows of the cluster take turns to load all of them."""
TWO_BY_TWO = gemm(200, 150, 1000, "gelu", True), tiles("64x80", "2x2", "pingpong"), 8
FOUR_BY_ONE = gemm(100, 500, 520, "swiglu", True), tiles("64x112", "4x1", swap=True), 8
IN_TURNS = gemm(20, 700, 1000), tiles("64x24", "4x1", swap=True), 4
"""Three cluster tiles for one cluster, whose thread blocks take turns to load 24 rows of A."""
THREE_CONSUMERS = gemm(330, 300, 704, "silu", True), tiles("192x144", "1x2"), 4
CASES = {
    "4x2, swapped": FOUR_BY_TWO,
    "2x2, ping-pong": TWO_BY_TWO,
    "4x1, gated": FOUR_BY_ONE,
    "4x1, in turns": IN_TURNS,
    "1x4": (gemm(150, 600, 704), tiles("128x144", "1x4"), 8),
    "2x4": (gemm(100, 200, 640), tiles("64x48", "2x4"), 16),
    "three consumers": THREE_CONSUMERS,
    "three consumers, swapped, odd columns of D": (
        gemm(150, 401, 520), tiles("192x176", "2x2", swap=True), 8,
    ),
}  # fmt: skip
"""Problem, configuration, and SMs of the host: room for one cluster or two."""


def verdict(
    problem: Problem, config: Config, sms: int,
    implementation: Implementation = wgmma.IMPLEMENTATION,
) -> Any:  # fmt: skip
    host = cuda_fibers.Host(max_blocks=sms, sms=sms)
    assert implementation.illegal(config, problem, host.gpu) is None
    return gate.check(implementation, problem, config, host, seeds=(0,))


@needs_compiler
@pytest.mark.parametrize("variant", [wgmma, fitted])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_product_is_right(case: Any, variant: Any) -> None:
    found = verdict(*case, variant.IMPLEMENTATION)
    assert found.passed, found.detail


def test_boxes_of_last_tiles_reach_to_the_end_of_the_operands() -> None:
    """Tiles of 72 rows of A are loaded whole: the second one has 58 rows, which are eight atoms."""
    problem, config, sms = FOUR_BY_TWO
    (step,) = fitted.IMPLEMENTATION.program(
        problem, config, cuda_fibers.Host(max_blocks=sms, sms=sms).gpu
    ).steps
    boxes = [p.box for p in step.params if isinstance(p, TensorMap) and p.tensor in ("a", "b")]
    assert boxes[:4] == [(64, 32), (64, 16), (64, 72), (64, 64)]


@pytest.mark.parametrize(
    ("rows", "block", "part", "height"),
    [(139, 64, 64, 16), (136, 64, 64, 8), (192, 64, 64, 64), (185, 64, 64, 64), (130, 72, 24, 16),
     (300, 64, 32, 16)],
)  # fmt: skip
def test_edge_boxes_have_whole_atoms(rows: int, block: int, part: int, height: int) -> None:
    assert edge_rows(rows, block, part) == height


def test_a_tune_leaves_products_of_whole_tiles_to_wgmma() -> None:
    gpu = cuda_fibers.Host(max_blocks=8, sms=8).gpu
    problem, config = gemm(128, 640, 704), tiles("64x64", "1x1")
    assert fitted.IMPLEMENTATION.illegal(config, problem, gpu) is None
    assert "wgmma takes as long" in str(fitted.IMPLEMENTATION.too_slow(config, problem, gpu))


@needs_compiler
def test_the_host_has_the_chunks_of_the_kernel(tmp_path: Path) -> None:
    """How D is cut is worked out here and where the kernel is compiled, for each tile."""
    gpu, asserts = cuda_fibers.Host(max_blocks=8, sms=8).gpu, set[str]()
    for activation, residual in product(("none", "swiglu"), (False, True)):
        problem = gemm(4096, 4096, 4096, activation, residual)
        for config in wgmma.IMPLEMENTATION.legal(problem, gpu):
            plan = wgmma.Plan.of(config, problem, gpu)
            numbers = plan.block_m, plan.block_n, 2, plan.pingpong, plan.swap, 1, 1, False, True
            values, adds = ", ".join(map(str, numbers)).lower(), str(residual).lower()
            tile = f"WgmmaTile<bfloat16, {values}, Activation::k{activation.title()}, {adds}, 64>"
            rows, cols = plan.chunk
            asserts.add(f"static_assert({tile}::kChunkRows == {rows});")
            asserts.add(f"static_assert({tile}::kChunkCols == {cols});")
    assert len(asserts) > 500
    lines = ['#include "gemm/wgmma_tile.cuh"', "using namespace kernelcat;", *sorted(asserts)]
    cuda_fibers.check_syntax("\n".join(lines), tmp_path)


PRODUCT = "gemm/wgmma_product.cuh"
RING, RELEASE = "include/kernelcat/operand_ring.cuh", "include/kernelcat/stage_release.cuh"
SCHEDULE = "include/kernelcat/block_schedule.cuh"
FAULTS = {
    "a part goes to another row of the cluster": (
        RING, "kRow << cluster_row * Config::kClusterN", "kRow", FOUR_BY_TWO,
    ),
    "a part goes to another column of the cluster": (
        RING, "kColumn << cluster_col", "kColumn", FOUR_BY_TWO,
    ),
    "all thread blocks of a column load the same rows": (
        RING, "else if (k_block % kSharers == part)", "else", FOUR_BY_TWO,
    ),
    "rows are loaded before the cluster's barriers are initialised": (
        RING, "      wait_for_cluster();\n", "", IN_TURNS,
    ),
    "a thread block ends while others still arrive at its barriers": (
        RING, "i < Config::kNumStages; ++i", "i < 0; ++i", IN_TURNS,
    ),
    "every work item is the first one": (
        SCHEDULE, "if (i < this->size()) work = (*this)[i];", "", IN_TURNS,
    ),
    "the last chunk of a tile does not overlap the one before": (
        "gemm/wgmma_store.cuh",
        "min(i % Config::kChunksPerWgmma * Config::kChunkSums,",
        "max(i % Config::kChunksPerWgmma * Config::kChunkSums,",
        FOUR_BY_TWO,
    ),
    "stages are released in the row of the cluster only": (
        RELEASE, "lane < kClusterM + kClusterN - 1", "lane < kClusterN", FOUR_BY_TWO,
    ),
    "a stage is overwritten before the column of the cluster has read it": (
        PRODUCT, "Config::kNumSharers *", "Config::kClusterN *", FOUR_BY_TWO,
    ),
    "a thread block has the tile of the one above it": (
        SCHEDULE, "rank / Config::kClusterN", "0", TWO_BY_TWO,
    ),
    "a stage is overwritten before the third consumer has read it": (
        PRODUCT, "Config::kConsumersPerTile * 4", "8", THREE_CONSUMERS,
    ),
    "the last part is loaded with rows outside": (
        RING, "left < kPart ? operand.edge : operand.whole", "operand.whole",
        (*FOUR_BY_TWO, fitted.IMPLEMENTATION),
    ),
    "bytes of rows outside are waited for": (
        RING, "Config::kStageBytes - outside * kRowBytes", "Config::kStageBytes",
        (*FOUR_BY_TWO, fitted.IMPLEMENTATION),
    ),
}  # fmt: skip
"""What is wrong -> file of kernels/cuda, text, replacement, and the case that shows it."""
FOUND = (
    "the cluster hangs",
    "a barrier has more arrivals than it was initialised for",
    "a thread block ends before others have accessed its memory",
)
"""What the host says of faults for which it stops."""


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: Any, tmp_path: Any) -> None:
    name, before, after, case = fault
    cuda_fibers.plant(monkeypatch, tmp_path, name, before, after)
    try:
        passed = verdict(*case).passed
    except AssertionError as error:
        assert str(error).startswith(FOUND)
    else:
        assert not passed
