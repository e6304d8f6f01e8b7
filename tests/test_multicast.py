"""`multicast_gemm`: clusters that cover D and fit on the GPU, and the machine code of multicast."""

from __future__ import annotations

import importlib.util
from math import ceil

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.kernels.cuda.multicast_gemm import clusters
from kernelcat.runtime import gpu, tensor_map
from kernelcat.verify import inspect

ENTRY = catalog.entry("multicast_gemm")
H200 = gpu.find("h200")
ALL = [i for language in ("cuda", "cute") for i in catalog.in_language(ENTRY.name, language)]
CUDA = [i for i in ALL if i.language == "cuda"]


def problem(m: int, n: int, k: int, dtype: str = "bfloat16") -> Problem:
    return ENTRY.problem(M=m, N=n, K=k, dtype=dtype)


BIG, RAGGED = problem(8192, 8192, 8192), problem(4097, 5000, 2056, "float16")
CORNERS = [
    # The largest accumulators; the most slices for each stage; slices of 48 rows; both operands
    # shared; only one operand shared.
    ("cuda", "multicast", BIG, {"tile": "256x192", "cluster": "2x2"}),
    ("cuda", "multicast", RAGGED, {"tile": "128x192", "cluster": "4x1"}),
    ("cuda", "multicast", BIG, {"tile": "128x256", "cluster": "1x2"}),
    ("cuda", "dsmem", RAGGED, {"tile": "128x256", "cluster": "4x1"}),
    ("cuda", "dsmem", BIG, {"tile": "256x128", "cluster": "2x2"}),
    ("cuda", "unicast", BIG, {"tile": "128x128", "cluster": "1x1"}),
    ("cute", "multicast", BIG, {"tile": "256x192", "cluster": "2x2"}),
    ("cute", "multicast", RAGGED, {"tile": "128x256", "cluster": "4x1"}),
    ("cute", "unicast", BIG, {"tile": "256x128", "cluster": "2x1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("language", "variant", "problem", "changes"), CORNERS)
def test_a_corner_compiles_without_spills_and_proves_its_techniques(
    language: str, variant: str, problem: Problem, changes: dict[str, str]
) -> None:
    if language == "cute" and importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs the CuTe DSL")
    implementation = catalog.implementation(ENTRY.name, language, variant)
    config = Config(implementation.default(problem, H200), **changes)
    (step,) = implementation.program(problem, config, H200).steps
    artifact = build(step.source, "sm_90a")
    assert artifact.metadata["spill_bytes"] == 0
    assert all(inspect.prove(implementation, artifact).values())
    report = inspect.inspect(artifact)
    assert report.has("UTMALDG*MULTICAST") == (variant == "multicast")
    assert not report.has("MEMBAR.ALL.GPU"), "a stage is released without a fence of the GPU"
    if language == "cuda":
        assert artifact.metadata["warnings"] == []
        assert len(inspect.parameters(artifact.cubin, artifact.kernel)) == len(step.params)


@pytest.mark.parametrize("implementation", ALL, ids=lambda i: i.name)
@pytest.mark.parametrize("problem", [problem(1, 8, 8), problem(300, 520, 72), BIG, RAGGED], ids=str)
def test_whole_clusters_cover_d_and_run_at_the_same_time(
    implementation: Implementation, problem: Problem
) -> None:
    for config in implementation.configs(problem, H200):
        (step,) = implementation.program(problem, config, H200).steps
        (block_m, block_n), (cluster_m, cluster_n) = (
            clusters.sizes(config[name]) for name in ("tile", "cluster")
        )
        size = cluster_m * cluster_n
        tiles = ceil(problem["M"] / block_m) * ceil(problem["N"] / block_n)
        assert step.cluster == (size, 1, 1) and step.grid[0] % size == 0
        assert step.grid[0] <= H200.sms
        assert clusters.cluster_tiles(problem, config) * size >= tiles
        assert implementation.estimate(problem, config, H200) > 0


@pytest.mark.parametrize("implementation", CUDA, ids=lambda i: i.name)
def test_slices_of_the_thread_blocks_that_share_an_operand_cover_its_tile(
    implementation: Implementation,
) -> None:
    for config in implementation.configs(RAGGED, H200):
        (step,) = implementation.program(RAGGED, config, H200).steps
        maps = {p.tensor: p for p in step.params if isinstance(p, TensorMap)}
        assert not any(map(tensor_map.why_not, maps.values())), config
        (block_m, block_n), (cluster_m, cluster_n) = (
            clusters.sizes(config[name]) for name in ("tile", "cluster")
        )
        shared = implementation.variant != "unicast"
        assert maps["a"].box[1] * (cluster_n if shared else 1) == block_m
        assert maps["b"].box[1] * (cluster_m if shared else 1) == block_n
        assert step.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("implementation", ALL, ids=lambda i: i.name)
def test_unaligned_rows_are_illegal_and_an_empty_d_launches_nothing(
    implementation: Implementation,
) -> None:
    for odd in (problem(64, 12, 64), problem(64, 64, 12), problem(64, 64, 0)):
        assert "multiples of 8" in str(
            implementation.why_not(implementation.default(odd, H200), odd, H200)
        )
    for empty in (problem(0, 64, 64), problem(64, 0, 64)):
        config = implementation.default(empty, H200)
        assert implementation.program(empty, config, H200).steps == ()


def test_clusters_of_four_leave_the_odd_sms_of_a_gpc_idle() -> None:
    four, two = Config(tile="128x256", cluster="2x2"), Config(tile="128x256", cluster="2x1")
    assert clusters.num_clusters(BIG, four, H200) == 32
    assert clusters.num_clusters(BIG, two, H200) == 66
