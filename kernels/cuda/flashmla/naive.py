"""`flashmla` by one warp per query token and head: the ladder's first step."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import context, num_rows, page_bits
from kernelcat.kernels.cuda.flashmla.operands import params, row_bytes, types
from kernelcat.runtime.gpu import Gpu

NUM_WARPS = 4
TOKEN_US = 0.5
"""Microseconds of a warp for a token: two loads, one after the other, and a sum over the lanes."""
RESIDENT_WARPS = 32
"""Warps that an SM holds at once."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(num_rows(problem) / NUM_WARPS), 2**31 - 1)
    if blocks == 0:
        return Program(())
    source = CudaSource(
        "flashmla/naive.cu", f"kernelcat::flashmla_naive<{', '.join(types(problem))}>"
    )
    arguments = (*params(problem), Int32(page_bits(problem)))
    return Program((Step(source, (blocks, 1, 1), arguments, 32 * NUM_WARPS),))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    tokens, rows = context(problem), num_rows(problem)
    waves = ceil(rows / (gpu.sms * RESIDENT_WARPS))
    read_us = copy_us(rows * tokens * row_bytes(problem), gpu)
    return LAUNCH_US + max(waves * tokens * TOKEN_US, read_us)


IMPLEMENTATION = Implementation(
    entry="flashmla",
    language="cuda",
    variant="naive",
    summary="one warp per query and head, one token after another, with an online softmax",
    archs=("sm_80+",),
    space={},
    program=_program,
    estimate=_estimate,
    techniques={"warp shuffle": "SHFL", "exponential by one instruction": "MUFU.EX2"},
    rank=0,
)
