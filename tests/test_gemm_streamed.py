"""`gemm/cuda/streamed`: machine code, and runs on the host."""

from __future__ import annotations

import corners
import cuda_fibers
import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.gemm.streamed import IMPLEMENTATION
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")


def gemm(m: int, n: int, k: int, activation: str = "none", **more: bool | str) -> Problem:
    more = {"bias": True, "residual": False, "dtype": "bfloat16", **more}
    return catalog.entry("gemm").problem(M=m, N=n, K=k, activation=activation, **more)


def config(stage_cols: int = 512, num_warps: int = 8, ring_kb: int = 64) -> Config:
    return Config(stage_cols=stage_cols, num_warps=num_warps, ring_kb=ring_kb)


def test_corners_compile_without_spills_and_prove_their_techniques() -> None:
    problems = (
        gemm(1, 2880, 2048),
        gemm(8, 5760, 2880, "swiglu", residual=True),
        gemm(16, 32, 2880, "gelu", dtype="float16"),
    )
    corners.check((IMPLEMENTATION, p, IMPLEMENTATION.default(p, H200)) for p in problems)


def test_what_it_does_not_serve_has_a_reason() -> None:
    for problem, reason in (
        (gemm(65, 64, 64), "tokens=65 are more than the 64"),
        (gemm(1, 64, 60), "K=60 must be a multiple of 8"),
        (gemm(1, 64, 0), "K=0: there are no rows of B to stream"),
    ):
        assert reason in str(IMPLEMENTATION.why_not(config(), problem, H200))


@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (gemm(1, 40, 600), config()),  # less than a stage for the last columns
        (gemm(1, 33, 8, bias=False), config(256)),  # an odd column, one vector
        (gemm(7, 70, 1032, "swiglu", residual=True), config(512, 16)),
        (gemm(3, 70, 264, "silu"), config(256, 8)),
        (gemm(17, 48, 520, "gelu", residual=True, dtype="float16"), config(1024, 16)),
        (gemm(64, 24, 96), config(256)),
    ],
)
def test_it_is_right_on_the_host(problem: Problem, config: Config) -> None:
    host = cuda_fibers.Host(max_blocks=1 << 10)
    assert IMPLEMENTATION.why_not(config, problem, host.gpu) is None
    verdict = gate.check(IMPLEMENTATION, problem, config, host, seeds=(0,))
    assert verdict.passed, verdict.detail
