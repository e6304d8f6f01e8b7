"""`paged_attn` by one warp a query token and head: the ladder's first step."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.paged_attn.operands import kind, num_rows, params, span, token_bytes
from kernelcat.runtime.gpu import Gpu

NUM_WARPS = 4
KEY_US = 0.4
"""What a warp takes for a key: two loads that wait for each other, and a sum over the lanes."""
WARPS_PER_SM = 48


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(num_rows(problem) / NUM_WARPS), 2**31 - 1)
    if blocks == 0:
        return Program(())
    source = CudaSource("paged_attn/naive.cu", f"kernelcat::paged_attn_naive<{kind(problem)}>")
    return Program((Step(source, (blocks, 1, 1), params(problem), 32 * NUM_WARPS),))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    keys, rows = span(problem, 1), num_rows(problem)
    waves = ceil(rows / (gpu.sms * WARPS_PER_SM))
    return LAUNCH_US + max(waves * keys * KEY_US, copy_us(rows * keys * token_bytes(problem), gpu))


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="naive",
    summary="a warp a query and head, one key after another, with a running softmax",
    archs=("sm_80+",),
    space={},
    illegal=lambda config, problem, gpu: None,
    default=lambda problem, gpu: Config(),
    program=_program,
    estimate=_estimate,
    techniques={"warp shuffle": "SHFL", "exponential by one instruction": "MUFU.EX2"},
    rank=0,
)
