"""`gemm` by wgmma on Hopper where tiles end outside of the product: no rows are loaded there.

136 x 2048 x 4096 in tiles of 64 x 64 takes 15.4 us by `wgmma` on an H200, 192 x 2048 x 4096 takes
10.9; see fitted_maps.py for the reason.
"""

from __future__ import annotations

from functools import partial

from kernelcat.catalog.implementation import Config, Implementation, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.fitted_maps import fitted_maps, nothing_outside
from kernelcat.kernels.cuda.gemm import wgmma
from kernelcat.kernels.cuda.gemm.operands import operand_map
from kernelcat.kernels.cuda.gemm.plan import Plan
from kernelcat.runtime.gpu import Gpu


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    def maps(name: str, rows: int, block: int, sharers: int) -> tuple[TensorMap, ...]:
        return fitted_maps(partial(operand_map, name, problem, rows), rows, block, sharers)

    return wgmma.program(problem, config, gpu, "fitted", maps)


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    plan = Plan.of(config, problem, gpu)
    return nothing_outside(plan) or wgmma.slower(config, problem, gpu, is_fitted=True)


IMPLEMENTATION = Implementation(
    entry="gemm",
    language="cuda",
    variant="fitted",
    summary="wgmma's kernel, whose last tiles load no rows outside of the product",
    archs=("sm_90a",),
    space=wgmma.SPACE,
    illegal=wgmma.illegal,
    unpromising=wgmma.unpromising,
    hopeless=wgmma.hopeless,
    too_slow=_too_slow,
    default=partial(wgmma.default, is_fitted=True),
    program=_program,
    estimate=partial(wgmma.estimate, is_fitted=True),
    techniques=wgmma.TECHNIQUES,
    rank=3,
)
