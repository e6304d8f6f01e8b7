"""`fp8_gemm` by wgmma on Hopper: the last tiles load no rows outside of the product."""

from __future__ import annotations

from functools import partial

from kernelcat.catalog.implementation import Config, Implementation, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.fitted_maps import fitted_maps, nothing_outside
from kernelcat.kernels.cuda.fp8_gemm import wgmma
from kernelcat.runtime.gpu import Gpu


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    def maps(name: str, rows: int, block: int, sharers: int) -> tuple[TensorMap, ...]:
        return fitted_maps(partial(wgmma.operand_map, name, problem, rows), rows, block, sharers)

    return wgmma.program(problem, config, gpu, "fitted", maps)


def _too_slow(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return nothing_outside(wgmma.Plan.of(config, problem, gpu))


IMPLEMENTATION = Implementation(
    entry="fp8_gemm",
    language="cuda",
    variant="fitted",
    summary="wgmma's kernel, whose last tiles load no rows outside of the product",
    archs=("sm_90a",),
    space=wgmma.SPACE,
    illegal=wgmma.illegal,
    unpromising=wgmma.unpromising,
    hopeless=wgmma.hopeless,
    too_slow=_too_slow,
    program=_program,
    estimate=partial(wgmma.estimate, is_fitted=True),
    techniques=wgmma.TECHNIQUES,
    rank=1,
)
