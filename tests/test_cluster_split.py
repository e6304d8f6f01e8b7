"""`gemm/cuda/cluster_split`: machine code, plans, and runs of whole clusters on the host."""

from __future__ import annotations

from typing import Any

import corners
import cuda_fibers
import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.gemm.cluster_split import IMPLEMENTATION, SplitPlan
from kernelcat.kernels.cuda.gemm.wgmma import IMPLEMENTATION as WGMMA
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")


def gemm(m: int, n: int, k: int, activation: str = "none", residual: bool = False) -> Problem:
    return catalog.entry("gemm").problem(
        M=m, N=n, K=k, dtype="bfloat16", bias=True, activation=activation, residual=residual
    )


def split(tile: str, split_k: int, *, swap: bool) -> Config:
    return Config(tile=tile, split_k=split_k, swap=swap)


CORNERS = [
    # The most accumulators and slices of each size, swapped and not; D without a tensor map.
    (gemm(251, 2048, 4096), split("128x256", 2, swap=False)),
    (gemm(432, 3584, 7168), split("128x256", 8, swap=True)),
    (gemm(300, 5002, 7168, "swiglu", True), split("128x192", 3, swap=True)),
    (gemm(300, 5000, 7168, "swiglu", True), split("64x192", 6, swap=False)),
    (gemm(300, 5000, 7168, "gelu", True), split("128x256", 2, swap=False)),
    (gemm(70, 5000, 7168), split("64x96", 2, swap=True)),
    (gemm(100, 2112, 7168), split("64x256", 4, swap=False)),
]


@pytest.mark.slow
def test_corners_compile_without_spills_and_prove_their_techniques() -> None:
    corners.check((IMPLEMENTATION, problem, config) for problem, config in CORNERS)


@pytest.mark.parametrize(("m", "n", "k"), [(251, 2048, 4096), (100, 2112, 7168), (68, 6920, 2304)])
def test_a_grid_is_whole_clusters_and_a_wave_of_them_fits_on_the_gpu(
    m: int, n: int, k: int
) -> None:
    problem = gemm(m, n, k)
    for config in IMPLEMENTATION.configs(problem, H200):
        plan = SplitPlan.of(config, problem, H200)
        step = IMPLEMENTATION.program(problem, config, H200).steps[0]
        assert step.cluster == (config["split_k"], 1, 1)
        assert step.grid[0] == plan.num_tiles * config["split_k"]
        # As many thread blocks as an SM is to hold share its memory.
        assert plan.residents * (step.shared_bytes + 1024) <= H200.shared_bytes + 1024
        assert step.shared_bytes > 4 * plan.block_m * plan.block_n  # the sums lie in the ring


def test_slices_that_no_chunk_fits_have_a_reason() -> None:
    why = IMPLEMENTATION.why_not(split("64x64", 8, swap=True), gemm(64, 2112, 7168), H200)
    assert why == "64 columns in 8 slices: each must be a multiple of 16"
    gated = gemm(64, 2112, 7168, "swiglu")
    assert IMPLEMENTATION.why_not(split("64x64", 4, swap=True), gated, H200) is None
    assert IMPLEMENTATION.why_not(split("64x64", 4, swap=False), gated, H200) is not None


def test_clusters_that_leave_sms_idle_count_as_a_further_wave() -> None:
    """33 clusters of four are as many thread blocks as SMs, but GPCs do not hold them at once."""
    config = split("128x128", 4, swap=False)
    one, two = (SplitPlan.of(config, gemm(128, 128 * n, 4096), H200) for n in (29, 33))
    assert (one.num_waves, two.num_waves) == (1, 2)


# ---- on the host -------------------------------------------------------------------------------

PAIRS = gemm(150, 134, 1064), split("128x64", 2, swap=False)
"""Two consumers; slices of 32 columns; D without a tensor map. Of 17 k-blocks, in whose last one K
ends, the second thread block has the ninth in the stage to which the first one sends sums."""
EIGHT = gemm(40, 200, 1024, "swiglu", True), split("64x128", 8, swap=True)
"""One consumer, and slices outside of D."""
HOST_CASES = {
    "pairs": PAIRS,
    "three, by tensor map": (gemm(70, 208, 712, "gelu"), split("128x96", 3, swap=True)),
    "four, gated": (gemm(70, 272, 1024, "swiglu", True), split("64x128", 4, swap=False)),
    "eight": EIGHT,
}
needs_compiler = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")


def verdict(problem: Problem, config: Config, variant: Implementation = IMPLEMENTATION) -> Any:
    host = cuda_fibers.Host(max_blocks=1 << 10)
    assert variant.why_not(config, problem, host.gpu) is None
    return gate.check(variant, problem, config, host, seeds=(0,))


@needs_compiler
@pytest.mark.parametrize("case", HOST_CASES.values(), ids=HOST_CASES)
def test_clusters_are_right_on_the_host(case: tuple[Problem, Config]) -> None:
    found = verdict(*case)
    assert found.passed, found.detail


FAULTS = {
    "sums arrive while other thread blocks still multiply": (
        "  cluster_wait();\n  typename Slice", "  typename Slice", PAIRS,
    ),
    "all thread blocks finish the first slice": ("work.split * Slice::BLOCK_N", "0", PAIRS),
    "a slice lacks the last split": (
        "int s = 1; s < Config::kSplits", "int s = 1; s < Config::kSplits - 1", EIGHT,
    ),
    "sums of all splits land in one place": ("&received[split]", "&received[0]", EIGHT),
    "nobody waits for the sums": ("  arrived.wait(0);\n", "", EIGHT),
}  # fmt: skip
"""What is wrong -> text of cluster_split.cu, replacement, and the case that shows it."""


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: Any, tmp_path: Any) -> None:
    before, after, case = fault
    cuda_fibers.plant(monkeypatch, tmp_path, "gemm/cluster_split.cu", before, after)
    try:
        assert not verdict(*case).passed
    except AssertionError as error:
        assert "gemm_cluster_split" in str(error)


@needs_compiler
@pytest.mark.parametrize("cluster", ["2x1", "1x2"])
def test_multicast_of_wgmma_is_right_on_the_host(cluster: str) -> None:
    config = Config(tile="64x128", schedule="cooperative", swap=False, cluster=cluster, split_k=1)
    found = verdict(gemm(100, 200, 512), config, WGMMA)
    assert found.passed, found.detail
