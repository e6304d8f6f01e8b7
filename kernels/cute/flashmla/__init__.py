"""`flashmla` in CuTe DSL."""

from __future__ import annotations

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Program, Step
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.flashmla.program import (
    compiled_in,
    is_empty,
    parameters,
    tensor_kinds,
    why_not,
)
from kernelcat.model import LAUNCH_US
from kernelcat.reference.flashmla import ENTRY
from kernelcat.spec import Problem

UNVERIFIED = "not yet run on a GPU"
NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*tensor_kinds(problem), *["int32"] * 4, "float32")
    source = CuteSource("flashmla.naive:Naive", kinds, tuple(compiled_in(problem).items()))
    grid = (problem["tokens"], -(-problem["heads"] // NAIVE_WARPS), 1)
    return Program((Step(source, grid, parameters(problem), block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="flashmla",
    language="cute",
    variant="naive",
    summary="one warp, one query of one head, token after token; any shape",
    archs=("sm_80+",),
    space={},
    reject=lambda config, problem, gpu: why_not(problem, gpu),
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
    unverified=UNVERIFIED,
)

IMPLEMENTATIONS = (NAIVE,)
