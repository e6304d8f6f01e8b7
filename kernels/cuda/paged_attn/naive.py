"""`paged_attn` by one warp per query token and head: the ladder's first step."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.paged_cache import num_rows
from kernelcat.kernels.cuda.paged_attn.operands import kind, params, span, token_bytes
from kernelcat.runtime.gpu import Gpu

NUM_WARPS = 4
KEY_US = 0.4
"""Microseconds of a warp for a key: two loads, one after the other, and a sum over the lanes."""
RESIDENT_WARPS = 48
"""Warps that an SM holds at once."""


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(num_rows(problem) / NUM_WARPS), 2**31 - 1)
    if blocks == 0:
        return Program(())
    source = CudaSource("paged_attn/naive.cu", f"kernelcat::paged_attn_naive<{kind(problem)}>")
    return Program((Step(source, (blocks, 1, 1), params(problem), 32 * NUM_WARPS),))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    keys, rows = span(problem, 1), num_rows(problem)
    waves = ceil(rows / (gpu.sms * RESIDENT_WARPS))
    return LAUNCH_US + max(waves * keys * KEY_US, copy_us(rows * keys * token_bytes(problem), gpu))


IMPLEMENTATION = Implementation(
    entry="paged_attn",
    language="cuda",
    variant="naive",
    summary="one warp per query and head, one key after another, with an online softmax",
    archs=("sm_80+",),
    space={},
    program=_program,
    estimate=_estimate,
    techniques={"warp shuffle": "SHFL", "exponential by one instruction": "MUFU.EX2"},
    rank=0,
)
