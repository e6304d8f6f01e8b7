"""Stream-K in CUDA: which work a thread block has, machine code, and runs on the host."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import corners
import cuda_fibers
import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.stream_k import StreamPlan
from kernelcat.kernels.cuda.gemm.stream_k import IMPLEMENTATION as GEMM
from kernelcat.kernels.cuda.nvfp4_matmul.stream_k import IMPLEMENTATION as NVFP4
from kernelcat.reference.nvfp4_matmul import product
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")


def gemm(m: int, n: int, k: int, activation: str = "none", residual: bool = False) -> Problem:
    return catalog.entry("gemm").problem(
        M=m, N=n, K=k, dtype="bfloat16", bias=True, activation=activation, residual=residual
    )


def tiles(m: int, n: int, k: int, **axes: Any) -> Problem:
    return product(m, n, k, packing="tiles", bias=True, **axes)


def streamed(tile: str, waves: int = 1, **axes: bool) -> Config:
    return Config(tile=tile, waves=waves, **axes)


CORNERS = [
    # The most accumulators with and without a residual, swapped and not; D without a tensor map.
    (GEMM, gemm(256, 57344, 8192), streamed("128x256", 2, swap=False)),
    (GEMM, gemm(256, 57344, 8192), streamed("256x160", swap=False)),
    (GEMM, gemm(200, 8192, 28672), streamed("128x224", swap=True)),
    (GEMM, gemm(300, 5002, 7168, "swiglu", True), streamed("128x192", swap=True)),
    (GEMM, gemm(300, 5000, 7168, "gelu", True), streamed("128x256", swap=False)),
    (NVFP4, tiles(256, 7168, 18432), streamed("128x256")),
    (NVFP4, tiles(300, 7168, 4096, format="mxfp4", activation="swiglu"), streamed("128x256")),
    (NVFP4, tiles(64, 2880, 2880, dtype="float16"), streamed("128x64")),
    (NVFP4, tiles(256, 7168, 18432, dtype="float8_e4m3fn"), streamed("128x256")),
]


@pytest.mark.slow
def test_corners_compile_without_spills_and_prove_their_techniques() -> None:
    corners.check(CORNERS)


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("num_tiles", [3, 40, 132, 133, 137, 200, 264, 300, 1000])
def test_every_k_block_has_one_thread_block_and_every_shared_part_its_slot(
    num_tiles: int, waves: int
) -> None:
    """The arithmetic of stream_k.cuh, in Python."""
    num_k, sms = 113, 132
    plan = StreamPlan(num_tiles, num_k, waves, sms)
    assert plan.num_whole % sms == 0 and plan.num_streamed < waves * sms
    units = plan.num_streamed * num_k
    if plan.why_illegal():
        return
    sms = plan.num_blocks
    bounds = [units * block // sms for block in range(sms + 1)]
    assert bounds[0] == 0 and bounds[-1] == units
    assert max(b - a for a, b in pairwise(bounds)) == plan.num_streamed_k
    slots, sharers = [], [0] * plan.num_streamed
    for block, (begin, end) in enumerate(pairwise(bounds)):
        for tile in range(begin // num_k, -(-end // num_k)):
            first = max(begin, tile * num_k)
            assert block == ((first + 1) * sms - 1) // units  # block_of
            sharers[tile] += 1
            slots.append(tile + block)
    assert sorted(set(slots)) == slots
    tile_bytes = 4 * 128 * 256
    assert (max(slots) + 1) * tile_bytes <= plan.workspaces(128 * 256, 2)["partials"]
    assert max(sharers) <= plan.num_sharers


def test_work_that_cannot_be_dealt_out_has_a_reason() -> None:
    why = GEMM.why_not(streamed("128x128", swap=False), gemm(1024, 2112, 4096), H200)
    assert why is not None and "fewer than 4 k-blocks for each of 132 thread blocks" in why


def test_a_quarter_of_a_wave_more_costs_about_a_quarter_of_a_wave() -> None:
    """160 tiles of 128 x 256 take 1.2 waves' time, where whole tiles take two."""
    config = streamed("128x256", 2, swap=False)
    one, more = (GEMM.estimate(gemm(128, 256 * n, 8192), config, H200) for n in (132, 160))
    assert 1.15 < more / one < 1.3


# ---- on the host -------------------------------------------------------------------------------

SPLIT = gemm(40, 134, 1000, "swiglu", True), streamed("128x64", swap=True), 7
"""Two tiles of 16 k-blocks on seven thread blocks."""
WAVES = gemm(150, 130, 448), streamed("128x64", 2, swap=False), 4
"""Six tiles of 7 k-blocks on four thread blocks: pairs, and tiles of one thread block."""
WHOLE = gemm(150, 256, 448), streamed("128x64", swap=False), 3
"""Six tiles in whole waves of three, and two streamed ones."""
PACKED = tiles(40, 250, 1008), streamed("128x64"), 4
HOST_CASES = {
    "split": (GEMM, *SPLIT),
    "waves": (GEMM, *WAVES),
    "whole": (GEMM, *WHOLE),
    "packed": (NVFP4, *PACKED),
    "packed and gated": (NVFP4, tiles(40, 250, 1008, activation="swiglu"), *PACKED[1:]),
}
needs_compiler = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")


def verdict(implementation: Implementation, problem: Problem, config: Config, sms: int) -> Any:
    """The gate's verdict, and the host with the workspaces of the last launch."""
    host = cuda_fibers.Host(max_blocks=sms, sms=sms)
    assert implementation.why_not(config, problem, host.gpu) is None
    return gate.check(implementation, problem, config, host, seeds=(0,)), host


@needs_compiler
@pytest.mark.parametrize("case", HOST_CASES.values(), ids=HOST_CASES)
def test_a_kernel_is_right_on_the_host_and_leaves_its_counters_at_zero(case: Any) -> None:
    found, host = verdict(*case)
    assert found.passed, found.detail
    assert host.workspaces["partials"].any() and not host.workspaces["counters"].any()


FAULTS = {
    "a thread block has another one's part": (
        "include/kernelcat/stream_k.cuh", "blockIdx.x) - sharers.first", "blockIdx.x)", SPLIT,
    ),
    "a tile is finished before all of its sums have arrived": (
        "include/kernelcat/stream_k.cuh", "count) == num_others", "count) + 1 == num_others",
        SPLIT,
    ),
    "sums of more than two sharers begin with the last one's": (
        "include/kernelcat/stream_k.cuh", "is_pair ? sums[tile][i] : 0.0f", "sums[tile][i]", SPLIT,
    ),
    "a pair adds its own sums": (
        "include/kernelcat/stream_k.cuh", "is_pair ? 1 - shared_tile.part : 0",
        "is_pair ? shared_tile.part : 0", WAVES,
    ),
    "whole tiles begin too late": (
        "include/kernelcat/stream_k.cuh", "whole = num_streamed + blockIdx.x",
        "whole = num_streamed + 1 + blockIdx.x", WHOLE,
    ),
}  # fmt: skip
"""What is wrong -> file of kernels/cuda, text, replacement, and the case that shows it."""


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: Any, tmp_path: Any) -> None:
    name, before, after, case = fault
    cuda_fibers.plant(monkeypatch, tmp_path, name, before, after)
    assert not verdict(GEMM, *case)[0].passed
