"""`fp8_gemm` in CUDA C++: one thread for each element, and Hopper's tensor cores."""

from __future__ import annotations

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Pointer, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import grid_stride_launch, instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.fp8_gemm import fitted, wgmma
from kernelcat.runtime.gpu import Gpu

NAIVE_THREADS = 256
NAIVE_FLOPS = 0.3e12
"""Operations a second of the baseline: a guess, from what was measured of gemm's on an H200."""


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return grid_stride_launch(
        instance("fp8_gemm/naive.cu", "fp8_gemm_naive"),
        (*map(Pointer, ("a", "a_scale", "b", "b_scale", "d")), *sizes(problem)),
        problem["M"] * problem["N"],
        items_per_block=NAIVE_THREADS,
        threads=NAIVE_THREADS,
    )


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return copy_us(m * k + n * k + 2 * m * n, gpu) + 2 * m * n * k / NAIVE_FLOPS * 1e6


NAIVE = baseline(
    "fp8_gemm",
    "one thread for each element; any shape",
    _naive,
    _naive_us,
    {"fused multiply-add": "FFMA"},
)

IMPLEMENTATIONS = (NAIVE, wgmma.IMPLEMENTATION, fitted.IMPLEMENTATION)
