"""`fp8_gemm` in CUDA C++: one thread an element, and Hopper's tensor cores."""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Int32, Param, Pointer, Program, Step
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.fp8_gemm import wgmma
from kernelcat.model import copy_us
from kernelcat.spec import Problem

NAIVE_THREADS = 256
NAIVE_FLOPS = 0.3e12
"""A guess at what one thread an element reaches, from gemm's on an H200."""


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = ceil(problem["M"] * problem["N"] / NAIVE_THREADS)
    if blocks == 0:
        return Program(())
    source = CudaSource("fp8_gemm/naive.cu", "kernelcat::fp8_gemm_naive")
    params: tuple[Param, ...] = (
        *map(Pointer, ("a", "a_scale", "b", "b_scale", "d")),
        *(Int32(problem[axis]) for axis in ("M", "N", "K")),
    )
    return Program((Step(source, (min(blocks, 2**31 - 1), 1, 1), params, NAIVE_THREADS),))


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return copy_us(m * k + n * k + 2 * m * n, gpu) + 2 * m * n * k / NAIVE_FLOPS * 1e6


IMPLEMENTATIONS = (
    Implementation(
        entry="fp8_gemm",
        language="cuda",
        variant="naive",
        summary="one thread an element; any shape",
        archs=("sm_80+",),
        space={},
        reject=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=_naive,
        estimate=_naive_us,
        techniques={"fused multiply-add": "FFMA"},
        rank=0,
    ),
    wgmma.IMPLEMENTATION,
)
