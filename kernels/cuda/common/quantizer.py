"""Kernels x -> (q, scale) in float8: what `fp8_quantize` and `fp8_swiglu` launch, and how."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline, element_by_element_us
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 8


def launch(
    problem: Problem,
    variant: str,
    shape: tuple[int, int],
    *constants: int,
    num_blocks: int,
    num_warps: int,
) -> Program:
    """One launch on x of ``shape``; ``constants`` follow x's type among the template arguments."""
    if num_blocks == 0:
        return Program(())
    entry = problem.entry
    source = instance(f"{entry}/{variant}.cu", f"{entry}_{variant}", problem["dtype"], *constants)
    params = (*map(Pointer, ("x", "q", "scale")), *map(Int32, shape))
    return Program((Step(source, (num_blocks, 1, 1), params, 32 * num_warps),))


def launch_naive(
    problem: Problem, shape: tuple[int, int], *constants: int, num_scales: int
) -> Program:
    """The launch of ``naive.cu``, in which every warp quantizes one block of scales at a time."""
    num_blocks = min(ceil(num_scales / NAIVE_WARPS), MAX_BLOCKS)
    return launch(problem, "naive", shape, *constants, num_blocks=num_blocks, num_warps=NAIVE_WARPS)


def naive(
    entry: str,
    program: Callable[[Problem, Config, Gpu], Program],
    bytes_moved: Callable[[Problem], int],
    unverified: str | None = None,
) -> Implementation:
    """The baseline of ``entry``."""
    return baseline(
        entry,
        "one warp for each block of scales, element by element, in two passes",
        program,
        element_by_element_us(bytes_moved),
        {"warp shuffle": "SHFL"},
        unverified,
    )
