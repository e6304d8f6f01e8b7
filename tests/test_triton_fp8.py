"""`fp8_gemm` and `fp8_quantize` in Triton's interpreter, on edge cases; no GPU needed.

tests/test_interpreter.py tests random problems, tests/test_compiles.py the machine code.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.runtime import gpu

H200 = gpu.find("h200")
FP8 = "float8_e4m3fn"


def gemm(variant: str, m: int, n: int, k: int, **config: int | str):
    return ("fp8_gemm", variant, config, {"M": m, "N": n, "K": k, "dtype": FP8})


def quantize(variant: str, m: int, k: int, dtype: str, block: str, **config: int):
    return ("fp8_quantize", variant, config, {"M": m, "K": k, "dtype": dtype, "block": block})


CASES = {
    "naive, ragged everywhere": gemm("naive", 37, 141, 301, tile="32x32"),
    "naive, nothing to add up": gemm("naive", 3, 5, 0, tile="32x64"),
    "tma, few rows": gemm("tma", 9, 264, 304, tile="16x64", stages=6, split_k=1),
    "tma, few rows, split": gemm("tma", 1, 136, 2064, tile="16x128", stages=4, split_k=4),
    "tma, odd N": gemm("tma", 50, 201, 272, tile="64x128", stages=3, split_k=1),
    "tma, split, past both edges": gemm("tma", 60, 71, 1040, tile="64x64", stages=6, split_k=2),
    "tma, large tiles": gemm("tma", 130, 264, 144, tile="128x128", stages=3, split_k=1),
    "persistent, several tiles a program": gemm(
        "persistent", 390, 776, 144, tile="128x64", stages=3, per_sm=1
    ),
    "persistent, odd N": gemm("persistent", 130, 395, 272, tile="64x128", stages=2, per_sm=2),
    "quantize, one element": quantize("naive", 1, 1, "bfloat16", "1x128"),
    "quantize, ragged rows": quantize("tiled", 37, 301, "float16", "1x128", rows=16, warps=4),
    "quantize, few rows": quantize("tiled", 3, 4100, "bfloat16", "1x128", rows=4, warps=2),
    "quantize, ragged blocks": quantize(
        "tiled", 130, 301, "bfloat16", "128x128", rows=128, warps=16
    ),
}


@pytest.fixture(scope="module")
def verdicts(interpreted) -> dict[str, list]:
    return interpreted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_at_its_edges(verdicts, name: str) -> None:
    reason, passed, detail = verdicts[name]
    assert reason is None
    assert passed, detail


@pytest.mark.parametrize("name", ["fp8_gemm", "fp8_quantize"])
def test_a_tune_tries_at_most_24_configurations_of_each_implementation(name: str) -> None:
    for implementation in catalog.in_language(name, "triton"):
        for problem in catalog.entry(name).problems.values():
            assert sum(1 for _ in implementation.configs(problem, H200)) <= 24


@pytest.mark.parametrize("name", ["fp8_gemm", "fp8_quantize"])
def test_an_empty_problem_has_no_steps(name: str) -> None:
    entry = catalog.entry(name)
    named = next(iter(entry.problems.values()))
    problem = entry.problem(**{**named.values, "M": 0})
    for implementation in catalog.in_language(name, "triton"):
        config = implementation.default(problem, H200)
        assert implementation.program(problem, config, H200).steps == ()


def test_one_binary_serves_every_m_and_k() -> None:
    entry, tma = catalog.entry("fp8_gemm"), catalog.implementation("fp8_gemm", "triton", "tma")
    config = Config(tile="16x64", stages=6, split_k=1)
    digests = {
        tma.program(entry.problem(M=m, N=7168, K=k, dtype=FP8), config, H200)
        .steps[0]
        .source.digest()
        for m, k in ((1, 2048), (7, 7168), (16, 272))
    }
    assert len(digests) == 1


def test_tma_is_illegal_where_k_is_no_multiple_of_16() -> None:
    entry, tma = catalog.entry("fp8_gemm"), catalog.implementation("fp8_gemm", "triton", "tma")
    problem = entry.problem(M=64, N=64, K=72, dtype=FP8)
    assert "multiple of 16" in (tma.why_not(tma.default(problem, H200), problem, H200) or "")
