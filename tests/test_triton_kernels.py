"""Triton kernels of `gemm`, `tma_copy` and cache writes in the interpreter; no GPU needed.

tests/test_interpreter.py tests random problems, tests/test_compiles.py the machine code.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.reference.kv_write import appended
from kernelcat.runtime import gpu

BF16, FP16 = "bfloat16", "float16"


def gemm(
    variant: str, m: int, n: int, k: int, dtype: str, bias: bool = False,
    activation: str = "none", residual: bool = False, **config: int | str,
):  # fmt: skip
    axes = {"M": m, "N": n, "K": k, "dtype": dtype, "bias": bias}
    return ("gemm", variant, config, {**axes, "activation": activation, "residual": residual})


def copy(variant: str, rows: int, cols: int, src: int, dst: int, dtype: str, **config: int):
    axes = {"rows": rows, "cols": cols, "src_stride": src, "dst_stride": dst, "dtype": dtype}
    return ("tma_copy", variant, config, axes)


def write(variant: str, tokens: int, batch: int, *heads: int, **more: int | str | bool):
    config = {name: more.pop(name) for name in ("block_h", "warps") if name in more}
    problem = appended(batch, *heads, 4, lengths="ragged", **more)
    return ("kv_write", variant, config, {**problem.values, "tokens": tokens})


CASES = {
    "naive, ragged everywhere": gemm("naive", 37, 45, 70, BF16, True, tile="32x32x32"),
    "naive, nothing to add up": gemm("naive", 3, 5, 0, BF16, True, tile="32x32x32"),
    "tiled, odd K": gemm("tiled", 70, 67, 131, BF16, False, tile="64x64x64", stages=3, split_k=1),
    "tiled, K is 0": gemm("tiled", 5, 31, 0, FP16, False, tile="16x64x128", stages=3, split_k=1),
    "tiled, split": gemm("tiled", 9, 70, 1100, FP16, True, tile="16x64x128", stages=3, split_k=2),
    "tiled, groups of tiles": gemm(
        "tiled", 1100, 70, 40, BF16, False, tile="128x128x32", stages=3, split_k=1
    ),
    "tma, few rows": gemm("tma", 9, 72, 264, BF16, True, tile="16x64x128", stages=3, split_k=1),
    "tma, few rows, split": gemm(
        "tma", 1, 72, 2080, BF16, True, tile="16x64x128", stages=4, split_k=4
    ),
    "tma, odd N": gemm("tma", 50, 71, 264, BF16, True, tile="64x64x128", stages=3, split_k=1),
    "tma, large tiles": gemm("tma", 130, 136, 72, FP16, False, tile="128x128x64", stages=3,
                             split_k=1),
    "tma, a mostly empty tile": gemm("tma", 5, 72, 264, BF16, True, tile="128x128x64", stages=3,
                                     split_k=1),
    "tma, tiles of fewer rows than M, split into more parts than k-blocks": gemm(
        "tma", 40, 72, 264, FP16, True, tile="16x64x128", stages=3, split_k=8
    ),
    "persistent, halves that no descriptor can store": gemm(
        "persistent", 150, 300, 72, BF16, True, "swiglu", True, tile="128x256x64", stages=3,
        subtiles=2,
    ),
    "persistent, several tiles a program": gemm(
        "persistent", 390, 776, 72, BF16, True, tile="128x256x64", stages=3, subtiles=2
    ),
    "persistent, ragged": gemm(
        "persistent", 130, 264, 72, FP16, True, tile="128x128x64", stages=3, subtiles=1
    ),
    "naive, every epilogue at once": gemm(
        "naive", 37, 46, 70, BF16, True, "swiglu", True, tile="32x64x32"
    ),
    "tiled, silu": gemm(
        "tiled", 70, 67, 131, BF16, False, "silu", True, tile="64x64x64", stages=3, split_k=1
    ),
    "tiled, swiglu of an odd number of pairs, split": gemm(
        "tiled", 9, 70, 1100, FP16, True, "swiglu", True, tile="16x64x128", stages=3, split_k=2
    ),
    "tma, gelu": gemm(
        "tma", 50, 72, 264, FP16, True, "gelu", True, tile="64x64x128", stages=3, split_k=1
    ),
    "tma, few rows, swiglu": gemm(
        "tma", 9, 80, 264, BF16, False, "swiglu", True, tile="16x64x128", stages=3, split_k=1
    ),
    "tma, swiglu that no descriptor can store": gemm(
        "tma", 9, 72, 264, BF16, True, "swiglu", False, tile="16x64x128", stages=3, split_k=1
    ),
    "tma, silu, split": gemm(
        "tma", 1, 72, 2080, BF16, True, "silu", True, tile="16x64x128", stages=4, split_k=4
    ),
    "persistent, swiglu in halves": gemm(
        "persistent", 390, 784, 72, BF16, True, "swiglu", True, tile="128x256x64", stages=3,
        subtiles=2,
    ),
    "persistent, gelu": gemm(
        "persistent", 130, 264, 72, FP16, False, "gelu", True, tile="128x128x64", stages=3,
        subtiles=1,
    ),
    "persistent, a residual that no descriptor can load": gemm(
        "persistent", 130, 263, 72, BF16, True, "silu", True, tile="128x128x64", stages=3,
        subtiles=1,
    ),
    "copy, one row": copy("vectorized", 1, 4099, 0, 0, BF16, tile_bytes=4096, warps=4),
    "copy, strided, tail": copy("vectorized", 37, 131, 144, 160, BF16, tile_bytes=4096, warps=4),
    "copy, odd strides": copy("vectorized", 37, 131, 133, 151, "uint8", tile_bytes=4096, warps=4),
    "copy, a column": copy("vectorized", 300, 1, 8, 3, "float32", tile_bytes=4096, warps=4),
    "copy, descriptors over one row": copy(
        "tensor_map", 1, 8192, 0, 0, BF16, tile_bytes=16384, width_bytes=128, stages=3, per_sm=2
    ),
    "copy, descriptors past both edges": copy(
        "tensor_map", 37, 112, 160, 144, "uint8", tile_bytes=16384, width_bytes=512, stages=3,
        per_sm=1,
    ),
    "copy, descriptors over a narrow matrix": copy(
        "tensor_map", 300, 4, 8, 12, "float32", tile_bytes=16384, width_bytes=128, stages=3,
        per_sm=2,
    ),
    "cache, more sequences than a chunk": write(
        "vectorized", 9, 1100, 1, 1, 64, block_h=8, warps=1
    ),
    "cache, halves of no power of two": write(
        "vectorized", 5, 3, 5, 3, 256, rotary_dim=96, block_h=4, warps=2
    ),
    "cache, pairs side by side": write(
        "vectorized", 5, 3, 9, 3, 128, rotary_dim=96, style="interleaved", block_h=8, warps=1
    ),
    "cache, naive, halves of no vectors": write("naive", 5, 3, 2, 1, 64, rotary_dim=22),
}  # fmt: skip

RUN_TWICE = """
def run_twice(entry, variant, config, axes):
    # Whether two runs with one set of workspaces agree, and the sum of the counters afterwards.
    problem = catalog.entry(entry).problem(**axes)
    implementation = catalog.implementation(entry, "triton", variant)
    program = implementation.program(problem, Config(config), device.gpu)
    spaces = {name: np.zeros(size, np.uint8) for name, size in program.workspaces.items()}
    arrays = dict(gate.prepare(catalog.entry(entry), problem, device).arrays)
    results = []
    for _ in range(2):
        interpret(replace(program, workspaces={}), {**arrays, **spaces})
        results.append(arrays["d"].copy())
    return bool((results[0] == results[1]).all()), int(spaces["arrivals"].sum())
"""
TWICE = "split, twice"


@pytest.fixture(scope="module")
def results(interpreted) -> dict[str, list]:
    return interpreted({**CASES, TWICE: (*CASES["tiled, split"], "run_twice")}, RUN_TWICE)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_at_its_edges(results, name: str) -> None:
    reason, passed, detail = results[name]
    assert reason is None
    assert passed, detail


def test_split_k_leaves_its_counters_at_zero(results) -> None:
    assert results[TWICE] == [True, 0]


@pytest.mark.parametrize("name", ["gemm", "multicast_gemm", "tma_copy"])
def test_a_tune_tries_at_most_40_configurations_of_each_implementation(name: str) -> None:
    target = gpu.find("h200")
    for implementation in catalog.in_language(name, "triton"):
        for problem in catalog.entry(name).problems.values():
            assert sum(1 for _ in implementation.configs(problem, target)) <= 40


def test_an_empty_problem_has_no_steps() -> None:
    for name, axes in {
        "gemm": {"M": 0},
        "multicast_gemm": {"N": 0},
        "tma_copy": {"rows": 0},
    }.items():
        entry = catalog.entry(name)
        named = next(iter(entry.problems.values()))
        problem = entry.problem(**{**named.values, **axes})
        for implementation in catalog.in_language(name, "triton"):
            config = implementation.default(problem, gpu.find("h200"))
            assert implementation.program(problem, config, gpu.find("h200")).steps == ()


def test_one_binary_serves_every_number_of_rows() -> None:
    entry, target = catalog.entry("gemm"), gpu.find("h200")
    tma = catalog.implementation("gemm", "triton", "tma")
    config = Config(tile="16x64x128", stages=4, split_k=1)
    digests = {
        tma.program(entry.problem(M=m, N=2880, K=4096, dtype=BF16, bias=False), config, target)
        .steps[0]
        .source.digest()
        for m in (1, 7, 8, 16)
    }
    assert len(digests) == 1


def test_tma_is_illegal_with_a_reason() -> None:
    entry, target = catalog.entry("gemm"), gpu.find("h200")
    problem = entry.problem(M=64, N=64, K=65, dtype=BF16, bias=False)
    tma = catalog.implementation("gemm", "triton", "tma")
    assert "multiple of 8" in (tma.why_not(tma.default(problem, target), problem, target) or "")
    small = replace(target, sku="small", shared_bytes=48 << 10)
    config = Config(tile="64x64x128", stages=4, split_k=1)
    problem = entry.problem(M=64, N=64, K=64, dtype=BF16, bias=False)
    assert "shared memory" in (tma.why_not(config, problem, small) or "")


def test_gluon_takes_as_many_stages_as_fit_in_shared_memory() -> None:
    from kernelcat.kernels.triton.gemm import gluon

    target, entry = gpu.find("h200"), catalog.entry("gemm")
    sizes = {"M": 4096, "N": 4096, "K": 4096, "dtype": BF16}
    for residual, activation, subtiles, expected in (
        (False, "none", 1, 3),
        (False, "none", 2, 4),
        (True, "none", 2, 3),  # waits as a whole
        (True, "swiglu", 2, 4),
    ):
        problem = entry.problem(**sizes, residual=residual, activation=activation)
        config = Config(tile="128x256x64", schedule="cooperative", subtiles=subtiles)
        assert gluon.num_stages(problem, config, target) == expected


def test_gluon_is_illegal_with_a_reason() -> None:
    entry, target = catalog.entry("gemm"), gpu.find("h200")
    gluon = catalog.implementation("gemm", "triton", "gluon")
    config = Config(tile="128x128x64", schedule="pingpong", subtiles=2, tail_splits=1)
    for sizes, reason in (
        ({"M": 128, "N": 128, "K": 65}, "multiple of 8"),
        ({"M": 128, "N": 129, "K": 64}, "multiple of 16 bytes"),
    ):
        problem = entry.problem(**sizes, dtype=BF16)
        assert reason in (gluon.why_not(config, problem, target) or "")


def test_gluon_splits_no_tile_into_more_parts_than_it_has_k_blocks() -> None:
    entry, target = catalog.entry("gemm"), gpu.find("h200")
    gluon = catalog.implementation("gemm", "triton", "gluon")
    config = Config(tile="128x128x64", schedule="cooperative", subtiles=2, tail_splits=4)
    for k, is_legal in ((192, False), (256, True)):
        problem = entry.problem(M=256, N=256, K=k, dtype=BF16)
        assert (gluon.why_not(config, problem, target) is None) == is_legal
        assert is_legal is False or "too short" in gluon.unpromising(config, problem, target)


def test_tiles_that_are_mostly_empty_are_legal_but_not_tried() -> None:
    entry, target = catalog.entry("gemm"), gpu.find("h200")
    problem = entry.problem(M=64, N=128, K=64, dtype=BF16)
    for variant, config in (
        ("gluon", Config(tile="128x128x64", schedule="pingpong", subtiles=2, tail_splits=1)),
        ("tma", Config(tile="128x128x64", stages=3, split_k=1)),
    ):
        implementation = catalog.implementation("gemm", "triton", variant)
        assert implementation.why_not(config, problem, target) is None
        assert "half empty" in implementation.unpromising(config, problem, target)
        assert config not in implementation.configs(problem, target)
