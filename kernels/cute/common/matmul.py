"""What the host sides of matrix products share: sizes, limits, the estimate of a naive kernel."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Int32, Param, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.runtime.gpu import Gpu

NAIVE_BLOCK = 16
"""Rows and columns of D that a thread block of a naive kernel computes, one element a thread."""

MAX_GRID_Y = 65535


def sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    """M, N and K as parameters of a kernel."""
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


def is_empty(problem: Problem) -> bool:
    """Whether D has no elements."""
    return problem["M"] == 0 or problem["N"] == 0


def span(problem: Problem) -> int:
    """Columns of A @ B^T that one column of D takes: a gate and what it gates for swiglu."""
    return 2 if problem["activation"] == "swiglu" else 1


def naive_program(
    source: CuteSource, problem: Problem, params: tuple[Param, ...], num_cols: int
) -> Program:
    """One thread for each element of D, which has ``num_cols`` columns."""
    if is_empty(problem):
        return Program(())
    grid = (ceil(num_cols / NAIVE_BLOCK), ceil(problem["M"] / NAIVE_BLOCK), 1)
    return Program((Step(source, grid, params, block=NAIVE_BLOCK * NAIVE_BLOCK),))


def illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why the grid of ``naive_program`` would have too many thread blocks along y."""
    if problem["M"] > MAX_GRID_Y * NAIVE_BLOCK:
        return f"M={problem['M']} needs more than {MAX_GRID_Y} thread blocks of {NAIVE_BLOCK} rows"
    return None


def naive_us(problem: Problem, gpu: Gpu, efficiency: float) -> float:
    """Microseconds of all multiply-adds at a part of the peak of float32."""
    flops = 2 * problem["M"] * problem["N"] * problem["K"]
    return LAUNCH_US + flops / (efficiency * gpu.flops["float32"]) * 1e6


def exceeds_shared(num_bytes: int, gpu: Gpu) -> str | None:
    """Why a thread block cannot have ``num_bytes`` of shared memory."""
    if num_bytes > gpu.shared_bytes:
        return f"{num_bytes} bytes of shared memory; {gpu.sku} has {gpu.shared_bytes}"
    return None
