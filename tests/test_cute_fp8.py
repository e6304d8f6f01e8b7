"""CuTe's FP8 kernels: spaces that serve, programs that add up, machine code that keeps promises."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

H200 = gpu.find("h200")


def variant(entry: str, name: str) -> Implementation:
    return catalog.implementation(entry, "cute", name)


def gemm(m: int, n: int, k: int) -> Problem:
    return catalog.entry("fp8_gemm").problem(M=m, N=n, K=k, dtype="float8_e4m3fn")


def quantize(m: int, k: int, block: str = "1x128", dtype: str = "bfloat16") -> Problem:
    return catalog.entry("fp8_quantize").problem(M=m, K=k, block=block, dtype=dtype)


def test_listing_the_kernels_does_not_import_the_dsl() -> None:
    code = (
        "import sys, kernelcat.kernels.cute.fp8_gemm, kernelcat.kernels.cute.fp8_quantize;"
        "print('cutlass' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def draw(entry: str, dice: random.Random) -> Problem:
    m, n, k = (dice.randint(0, top) for top in (3000, 6000, 6000))
    unit = dice.choice([1, 16])
    if entry == "fp8_gemm":
        return gemm(m, n // unit * unit, k // unit * unit)
    block, dtype = dice.choice(["1x128", "128x128"]), dice.choice(["bfloat16", "float16"])
    return quantize(m, k // unit * unit, block, dtype)


@pytest.mark.parametrize("entry", ["fp8_gemm", "fp8_quantize"])
def test_spaces_stay_small_and_defaults_are_legal(entry: str) -> None:
    dice = random.Random(0)
    for _ in range(200):
        problem = draw(entry, dice)
        for implementation in catalog.in_language(entry, "cute"):
            configs = list(implementation.configs(problem, H200))
            assert len(configs) <= 10, f"{implementation.name} {problem}"
            default = implementation.default(problem, H200)
            assert (default in configs) == bool(configs), f"{implementation.name} {problem}"
            for config in configs:
                assert implementation.estimate(problem, config, H200) > 0
                adds_up(implementation.program(problem, config, H200), problem)


def adds_up(program: Program, problem: Problem) -> None:
    empty = 0 in [problem[axis.name] for axis in catalog.entry(problem.entry).axes[:2]]
    assert empty == (not program.steps)
    for step in program.steps:
        assert len(step.source.params) == len(step.params)
        assert min(step.grid) > 0 and step.grid[0] % step.cluster[0] == 0


@pytest.mark.parametrize(
    "problem",
    [gemm(3, 5, 7), gemm(1, 1, 0), quantize(3, 5), quantize(300, 1001, "128x128")],
    ids=str,
)
def test_one_variant_serves_every_shape(problem: Problem) -> None:
    assert variant(problem.entry, "naive").why_not(Config(), problem, H200) is None


def test_few_rows_still_fill_the_gpu() -> None:
    wgmma, problem = variant("fp8_gemm", "wgmma"), gemm(64, 2112, 7168)
    assert wgmma.program(problem, wgmma.default(problem, H200), H200).steps[0].grid[0] >= 100


def test_split_k_has_room_for_whole_tiles_and_a_counter_for_each_warpgroup() -> None:
    wgmma = variant("fp8_gemm", "wgmma")
    config = Config(block_m=128, block_n=16, cluster=1, swap=True, split_k=2, whole_tile=True)
    program = wgmma.program(gemm(3, 2880, 4096), config, H200)
    tiles = 23
    assert program.workspaces == {"partial": 2 * tiles * 128 * 16 * 4, "counters": 2 * tiles * 4}


@pytest.mark.parametrize("problem", [gemm(64, 64, 72), gemm(64, 60, 128), gemm(64, 64, 0)], ids=str)
def test_tma_refuses_rows_that_are_not_whole_units(problem: Problem) -> None:
    wgmma = variant("fp8_gemm", "wgmma")
    reason = wgmma.why_not(wgmma.default(problem, H200), problem, H200)
    assert reason and "16" in reason


LARGE, RAGGED = gemm(4096, 7168, 2048), gemm(4097, 5000, 2064)
PROVEN = [
    ("naive", gemm(100, 77, 96), {}),
    ("wgmma", LARGE, {"block_m": 256, "block_n": 128, "cluster": 2}),
    ("wgmma", RAGGED, {"block_m": 128, "block_n": 192, "cluster": 1}),
    ("wgmma", RAGGED, {"block_m": 128, "block_n": 160, "cluster": 1}),
    ("wgmma", gemm(128, 2112, 7168), {"block_n": 64, "split_k": 4}),
    ("wgmma", gemm(64, 2112, 7168), {"block_m": 64, "split_k": 4}),
    ("wgmma", gemm(1, 7168, 2048), {"block_m": 128, "split_k": 1}),
    ("naive", quantize(300, 1001), {}),
    ("vectorized", quantize(4096, 7168), {}),
    ("vectorized", quantize(4096, 7168, "128x128", "float16"), {}),
]


def test_the_machine_code_proves_the_techniques() -> None:
    built = []
    for name, problem, changes in PROVEN:
        implementation = variant(problem.entry, name)
        config = Config(implementation.default(problem, H200), **changes)
        assert implementation.why_not(config, problem, H200) is None
        (step,) = implementation.program(problem, config, H200).steps
        built.append((implementation, jit.build(step.source, "sm_90a")))
    reports = inspect.inspect_all([artifact for _, artifact in built])
    for (implementation, artifact), report in zip(built, reports, strict=True):
        proofs = inspect.proofs(implementation, [report])
        assert all(proofs.values()), (implementation.name, proofs)
        assert artifact.metadata["spill_bytes"] == 0


def test_blackwell_promotes_out_of_tensor_memory_without_spilling() -> None:
    tcgen05, b200 = variant("fp8_gemm", "tcgen05"), gpu.find("b200")
    for block_n in (128, 64):
        (step,) = tcgen05.program(RAGGED, Config(block_n=block_n), b200).steps
        artifact = jit.build(step.source, b200.arch)
        assert all(inspect.prove(tcgen05, artifact).values())
        assert artifact.metadata["spill_bytes"] == 0
        assert inspect.inspect(artifact).opcodes["FFMA"] == block_n


def test_large_tiles_multicast_and_promote_with_one_multiply_add_an_element() -> None:
    wgmma = variant("fp8_gemm", "wgmma")
    config = Config(wgmma.default(LARGE, H200), block_m=256, block_n=128, cluster=2)
    (step,) = wgmma.program(LARGE, config, H200).steps
    report = inspect.inspect(jit.build(step.source, "sm_90a"))
    for pattern in ("UTMALDG*MULTICAST", "USETMAXREG", "UTMASTG", "STSM", "QGMMA.64x128x32"):
        assert report.has(pattern), pattern
    assert report.opcodes["FFMA"] == 256 * 128 // 256
