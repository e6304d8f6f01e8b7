"""`fp8_gemm` in CUDA C++: one thread an element, and Hopper's tensor cores."""

from __future__ import annotations

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Pointer, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.fp8_gemm import wgmma
from kernelcat.kernels.cuda.gemm.naive import baseline, launch
from kernelcat.kernels.cuda.gemm.operands import sizes
from kernelcat.runtime.gpu import Gpu

NAIVE_FLOPS = 0.3e12
"""A guess at what one thread an element reaches, from gemm's on an H200."""


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    source = CudaSource("fp8_gemm/naive.cu", "kernelcat::fp8_gemm_naive")
    pointers = map(Pointer, ("a", "a_scale", "b", "b_scale", "d"))
    return launch(source, problem["M"] * problem["N"], (*pointers, *sizes(problem)))


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return copy_us(m * k + n * k + 2 * m * n, gpu) + 2 * m * n * k / NAIVE_FLOPS * 1e6


IMPLEMENTATIONS = (
    baseline("fp8_gemm", "one thread an element; any shape", _naive, _naive_us),
    wgmma.IMPLEMENTATION,
)
