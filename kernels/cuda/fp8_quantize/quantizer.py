"""Kernels x -> (q, scale): their launch, and the baseline of every entry that has them."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.runtime.gpu import Gpu

MAX_GRID = 2**31 - 1
NAIVE_WARPS = 8


def launch(
    problem: Problem,
    variant: str,
    shape: tuple[int, int],
    *constants: int,
    blocks: int,
    num_warps: int,
) -> Program:
    """One launch on x of ``shape``; ``constants`` follow x's type among template arguments."""
    if blocks == 0:
        return Program(())
    entry = problem.entry
    arguments = ", ".join((f"kernelcat::{problem['dtype']}", *map(str, constants)))
    source = CudaSource(f"{entry}/{variant}.cu", f"kernelcat::{entry}_{variant}<{arguments}>")
    params = (*map(Pointer, ("x", "q", "scale")), *map(Int32, shape))
    return Program((Step(source, (blocks, 1, 1), params, 32 * num_warps),))


def launch_naive(
    problem: Problem, shape: tuple[int, int], *constants: int, num_scales: int
) -> Program:
    blocks = min(ceil(num_scales / NAIVE_WARPS), MAX_GRID)
    return launch(problem, "naive", shape, *constants, blocks=blocks, num_warps=NAIVE_WARPS)


def naive(
    entry: str,
    program: Callable[[Problem, Config, Gpu], Program],
    bytes_moved: Callable[[Problem], int],
    **fields: Any,
) -> Implementation:
    """The baseline of ``entry``, whose kernel is in ``ENTRY/naive.cu``."""
    return Implementation(
        entry=entry,
        language="cuda",
        variant="naive",
        summary="a warp a block of scales, element by element, in two passes",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=program,
        estimate=lambda problem, config, gpu: LAUNCH_US + 8 * copy_us(bytes_moved(problem), gpu),
        techniques={"warp shuffle": "SHFL"},
        rank=0,
        **fields,
    )
