"""The baseline of `gemm`: one thread for each element of D."""

from __future__ import annotations

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Pointer, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import grid_stride_launch, instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, d_cols, epilogue
from kernelcat.runtime.gpu import Gpu

THREADS = 256
FLOPS = 0.5e12
"""Operations a second on an H200, where 8192^3 was measured to take 2.23 s."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return grid_stride_launch(
        instance("gemm/naive.cu", "gemm_naive", problem["dtype"], *epilogue(problem)),
        (Pointer("a"), Pointer("b"), *EPILOGUE, *sizes(problem)),
        problem["M"] * d_cols(problem),
        items_per_block=THREADS,
        threads=THREADS,
    )


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return copy_us(2 * (m * k + n * k + m * n), gpu) + 2 * m * n * k / FLOPS * 1e6


IMPLEMENTATION = baseline(
    "gemm",
    "one thread for each element",
    _program,
    _estimate,
    {"fused multiply-add": "FFMA"},
)
