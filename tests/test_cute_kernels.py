"""CuTe kernels: spaces that serve, programs that add up, machine code that keeps its promises."""

from __future__ import annotations

import random
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


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", **epilogue: bool | str) -> Problem:
    return catalog.entry("gemm").problem(M=m, N=n, K=k, dtype=dtype, **epilogue)


def copy(rows: int, cols: int, src: int = 0, dst: int = 0, dtype: str = "bfloat16") -> Problem:
    return catalog.entry("tma_copy").problem(
        rows=rows, cols=cols, src_stride=src or cols, dst_stride=dst or cols, dtype=dtype
    )


def test_listing_the_kernels_does_not_import_the_dsl() -> None:
    import subprocess

    code = (
        "import sys, kernelcat.kernels.cute.gemm, kernelcat.kernels.cute.tma_copy;"
        "print('cutlass' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def draw(entry: str, dice: random.Random) -> Problem:
    if entry == "tma_copy":
        rows, cols = dice.randint(0, 300), dice.randint(0, 3000)
        strides = [cols + dice.choice([0, 0, 8, 16, 5]) for _ in range(2)]
        return copy(rows, cols, *strides, dice.choice(["bfloat16", "float32", "uint8"]))
    unit = dice.choice([1, 8])
    m, n, k = (dice.randint(0, top) for top in (3000, 6000, 6000))
    activation = dice.choice(["none", "silu", "gelu", "swiglu"])
    unit_n = 2 * unit if activation == "swiglu" else unit
    epilogue = {"bias": dice.random() < 0.5, "residual": dice.random() < 0.5}
    return gemm(m, n // unit_n * unit_n, k // unit * unit, activation=activation, **epilogue)


MOST = {"gemm": 60, "tma_copy": 8}


@pytest.mark.parametrize("entry", ["gemm", "tma_copy"])
def test_spaces_stay_small_and_defaults_are_legal(entry: str) -> None:
    dice = random.Random(0)
    for _ in range(300):
        problem = draw(entry, dice)
        for implementation in catalog.in_language(entry, "cute"):
            configs = list(implementation.configs(problem, H200))
            assert len(configs) <= MOST[entry], f"{implementation.name} {problem}"
            default = implementation.default(problem, H200)
            assert (default in configs) == bool(configs), f"{implementation.name} {problem}"
            for config in configs:
                assert implementation.estimate(problem, config, H200) > 0
                adds_up(implementation.program(problem, config, H200), problem)


def adds_up(program: Program, problem: Problem) -> None:
    empty = 0 in [problem[a.name] for a in catalog.entry(problem.entry).axes[:2]]
    assert empty == (not program.steps)
    for step in program.steps:
        assert len(step.source.params) == len(step.params)
        assert min(step.grid) > 0 and step.grid[0] % step.cluster[0] == 0


def test_one_variant_serves_every_gemm() -> None:
    naive = variant("gemm", "naive")
    for sizes in ((3, 5, 7), (1, 1, 0), (0, 4, 4)):
        assert naive.why_not(Config(), gemm(*sizes), H200) is None


FEW_COLUMNS = ("64x32x2880", "1000x256x7168")
"""Problems with fewer tiles than the GPU has SMs, in every tile and split."""
NAMED = [(n, p) for n, p in catalog.entry("gemm").problems.items() if n not in FEW_COLUMNS]


@pytest.mark.parametrize(("name", "problem"), NAMED, ids=[name for name, _ in NAMED])
def test_each_named_problem_has_a_few_candidates_that_fill_the_gpu(
    name: str, problem: Problem
) -> None:
    variants = [variant("gemm", name) for name in ("wgmma", "skinny")]
    candidates = [(i, config) for i in variants for config in i.configs(problem, H200)]
    assert 4 <= len(candidates) <= 30
    grids = [i.program(problem, config, H200).steps[0].grid[0] for i, config in candidates]
    assert max(grids) >= 0.9 * H200.sms


def test_a_single_wave_is_found_where_tiles_of_one_size_make_1_2() -> None:
    wgmma = variant("gemm", "wgmma")
    config = wgmma.default(gemm(1024, 5120, 2880), H200)
    assert config["block_m"] * config["block_n"] == 256 * 160
    (step,) = wgmma.program(gemm(1024, 5120, 2880), config, H200).steps
    assert step.grid[0] == 128


def test_a_split_is_one_kernel_without_workspace() -> None:
    skinny = variant("gemm", "skinny")
    config = Config(block_m=64, block_n=8, split_k=3, ctas_per_sm=2)
    program = skinny.program(gemm(3, 2880, 4096), config, H200)
    assert not program.workspaces
    (step,) = program.steps
    assert step.grid == (45 * 3, 1, 1) and step.cluster == (3, 1, 1)


@pytest.mark.parametrize("name", ["wgmma", "skinny"])
def test_half_of_the_columns_must_be_whole_units_too(name: str) -> None:
    implementation = variant("gemm", name)
    problem = gemm(100, 24, 64, activation="swiglu")
    reason = implementation.why_not(implementation.default(problem, H200), problem, H200)
    assert reason and "16-byte" in reason


@pytest.mark.parametrize(
    ("problem", "fields"),
    [
        (copy(1, 1 << 32), (8 << 20, 256, 256, 256)),
        (copy(4096, 8192, 16384, 16384), (4096, 4096, 8192, 8192)),
        (copy(8191, 4096, 4104, 4104), (8191, 2048, 2052, 2052)),
        (copy(5, 16, 32, 48, "uint8"), (5, 4, 8, 12)),
    ],
)
def test_copies_are_folded_into_what_a_tensor_map_describes(
    problem: Problem, fields: tuple[int, ...]
) -> None:
    tensor_map = variant("tma_copy", "tensor_map")
    config = tensor_map.default(problem, H200)
    assert tensor_map.why_not(config, problem, H200) is None
    params = tensor_map.program(problem, config, H200).steps[0].params
    assert tuple(p.value for p in params[2:6]) == fields


@pytest.mark.parametrize("problem", [copy(4, 7, 9, 9), copy(4, 7, 8, 8), copy(1, 7)], ids=str)
def test_tma_refuses_strides_it_cannot_step_and_rows_it_would_write_past(problem: Problem) -> None:
    tensor_map = variant("tma_copy", "tensor_map")
    reason = tensor_map.why_not(tensor_map.default(problem, H200), problem, H200)
    assert reason and "16" in reason


ALL = {"bias": True, "residual": True}
BIG, ODD = gemm(4096, 4096, 4096), gemm(100, 77, 96, bias=True)
PROVEN = [
    ("gemm", "naive", "h200", ODD, {}),
    ("gemm", "tiled", "h200", BIG, {}),
    ("gemm", "tiled", "a100", ODD, {"block_m": 64, "block_n": 64}),
    ("gemm", "tiled", "b200", gemm(64, 64, 64, dtype="float16"), {}),
    ("gemm", "tiled", "h200", gemm(100, 78, 96, activation="swiglu", **ALL), {}),
    ("gemm", "wgmma", "h200", BIG, {}),
    ("gemm", "wgmma", "h200", gemm(1024, 5120, 2880), {"block_m": 256, "pingpong": False}),
    ("gemm", "wgmma", "h200", gemm(4097, 5000, 2056, activation="gelu", **ALL), {}),
    ("gemm", "wgmma", "h200", gemm(1024, 5120, 2880, activation="swiglu", **ALL), {}),
    ("gemm", "skinny", "h200", gemm(64, 201088, 2880, activation="silu", **ALL), {}),
    ("gemm", "skinny", "h200", gemm(16, 2112, 7168, activation="swiglu", **ALL), {"split_k": 8}),
    ("gemm", "tcgen05", "b200", gemm(4097, 5000, 2056, bias=True), {}),
    ("gemm", "tcgen05", "b200", gemm(4096, 5120, 2880, activation="swiglu", **ALL), {}),
    ("tma_copy", "vectorized", "a100", copy(1, 1 << 25), {}),
    ("tma_copy", "vectorized", "h200", copy(9, 33, 35, 37), {}),
    ("tma_copy", "tensor_map", "h200", copy(1, 1 << 25), {}),
    ("tma_copy", "tensor_map", "b200", copy(8191, 4096, 4104, 4104), {}),
]


@pytest.mark.parametrize("sku", ["h200", "b200", "a100"])
def test_the_machine_code_proves_the_techniques(sku: str) -> None:
    target, built = gpu.find(sku), []
    for entry, name, _, problem, changes in (case for case in PROVEN if case[2] == sku):
        implementation = variant(entry, name)
        config = Config(implementation.default(problem, target), **changes)
        assert implementation.why_not(config, problem, target) is None
        (step,) = implementation.program(problem, config, target).steps
        built.append((implementation, jit.build(step.source, target.arch)))
    reports = inspect.inspect_all([artifact for _, artifact in built])
    for (implementation, artifact), report in zip(built, reports, strict=True):
        proofs = inspect.proofs(implementation, [report])
        assert all(proofs.values()), (implementation.name, proofs)
        assert artifact.metadata["spill_bytes"] == 0
        assert artifact.metadata["registers"] <= 255


def test_wide_tiles_multicast_and_reallocate_registers() -> None:
    wgmma = variant("gemm", "wgmma")
    config = Config(block_m=128, block_n=256, cluster="2x1", pingpong=False)
    (step,) = wgmma.program(BIG, config, H200).steps
    report = inspect.inspect(jit.build(step.source, "sm_90a"))
    for pattern in ("UTMALDG*MULTICAST", "USETMAXREG", "UTMASTG", "STSM", "HGMMA"):
        assert report.has(pattern), pattern


@pytest.mark.parametrize(
    ("cluster", "block_m", "pingpong"), [("1x2", 256, False), ("2x1", 128, True)]
)
def test_either_operand_is_multicast_in_either_schedule(
    cluster: str, block_m: int, pingpong: bool
) -> None:
    wgmma = variant("gemm", "wgmma")
    config = Config(block_m=block_m, block_n=160, cluster=cluster, pingpong=pingpong)
    (step,) = wgmma.program(gemm(1024, 5120, 2880), config, H200).steps
    artifact = jit.build(step.source, "sm_90a")
    assert artifact.metadata["spill_bytes"] == 0
    assert inspect.inspect(artifact).has("UTMALDG*MULTICAST")


def test_pairs_of_sms_multiply_together_on_blackwell() -> None:
    tcgen05, b200 = variant("gemm", "tcgen05"), gpu.find("b200")
    config = tcgen05.default(BIG, b200)
    assert config["ctas"] == 2
    (step,) = tcgen05.program(BIG, config, b200).steps
    report = inspect.inspect(jit.build(step.source, "sm_100a"))
    for pattern in ("UTCHMMA*2CTA", "UTMALDG*2CTA", "LDTM"):
        assert report.has(pattern), pattern


def test_vectors_are_as_wide_as_the_strides_allow() -> None:
    vectorized = variant("tma_copy", "vectorized")
    for stride, opcode in ((4104, "LDG.E.128"), (4100, "LDG.E.64"), (4098, "LDG.E")):
        (step,) = vectorized.program(copy(64, 4093, stride, stride), Config(unroll=4), H200).steps
        assert inspect.inspect(jit.build(step.source, "sm_90a")).has(opcode)
