"""The baseline of every product: one thread an element of D."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Param, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.gemm.operands import EPILOGUE, d_cols, epilogue, sizes
from kernelcat.runtime.gpu import Gpu

THREADS = 256
FLOPS = 0.5e12
"""What one thread an element reaches on an H200 (2.23 s for 8192^3)."""


def launch(source: CudaSource, num_elements: int, params: tuple[Param, ...]) -> Program:
    blocks = ceil(num_elements / THREADS)
    if blocks == 0:
        return Program(())
    return Program((Step(source, (min(blocks, 2**31 - 1), 1, 1), params, THREADS),))


def baseline(
    entry: str,
    summary: str,
    program: Callable[[Problem, Config, Gpu], Program],
    estimate: Callable[[Problem, Config, Gpu], float],
) -> Implementation:
    """The lowest step of ``entry``'s ladder: nothing to choose, and nothing it cannot serve."""
    return Implementation(
        entry=entry,
        language="cuda",
        variant="naive",
        summary=summary,
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=program,
        estimate=estimate,
        techniques={"fused multiply-add": "FFMA"},
        rank=0,
    )


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    arguments = f"kernelcat::{problem['dtype']}, {epilogue(problem)}"
    source = CudaSource("gemm/naive.cu", f"kernelcat::gemm_naive<{arguments}>")
    params = (Pointer("a"), Pointer("b"), *EPILOGUE, *sizes(problem))
    return launch(source, problem["M"] * d_cols(problem), params)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    m, n, k = problem["M"], problem["N"], problem["K"]
    return copy_us(2 * (m * k + n * k + m * n), gpu) + 2 * m * n * k / FLOPS * 1e6


IMPLEMENTATION = baseline("gemm", "one thread an element", _program, _estimate)
