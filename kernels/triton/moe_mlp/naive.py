"""The baseline of `moe_mlp`: a row and a block of columns of each product a program."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.composition import composed
from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.experts import illegal_type
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.moe_mlp.operands import (
    constants,
    pointers,
    route,
    routing_workspaces,
    sizes,
    weights,
    why_not_routed,
)
from kernelcat.reference._moe_parts import is_empty, num_assignments
from kernelcat.reference.moe_mlp import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.moe_mlp.naive_device:"
FLOPS = 2e12
"""Operations a second, a guess: the products are computed without tensor cores."""


def _first(problem: Problem, block: int) -> Step:
    return triton.step(
        KERNELS + "first",
        (num_assignments(problem), ceil(2 * problem["inter"] / block), 1),
        pointers(problem, "x") | weights(problem, 1) | pointers(problem, "ids", "h")
        | sizes(problem, 1),
        {**constants(problem), "ACTIVATION": problem["activation"], "BLOCK_N": block},
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


def _second(problem: Problem, block: int) -> Step:
    return triton.step(
        KERNELS + "second",
        (problem["tokens"], ceil(problem["hidden"] / block), 1),
        pointers(problem, "h") | weights(problem, 2)
        | pointers(problem, "ids", "gates", "residual", "out") | sizes(problem, 2),
        {**constants(problem), "HAS_RESIDUAL": problem["residual"], "BLOCK_N": block},
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    block, num_h = config["block"], num_assignments(problem) * problem["inter"]
    first = (_first(problem, block),) if num_h else ()
    return composed(
        route(problem),
        Program((*first, _second(problem, block))),
        workspaces={**routing_workspaces(problem), "h": num_h * itemsize(problem["dtype"])},
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_rows = max(2 * problem["inter"], problem["hidden"])
    if num_rows > MAX_GRID_Y * config["block"]:
        return f"{num_rows} rows of weights take more than {MAX_GRID_Y} programs on a second axis"
    return why_not_routed(problem) or illegal_type(problem, gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    us = copy_us(ENTRY.bytes_moved(problem), gpu) + ENTRY.flops(problem) / FLOPS * 1e6
    return us + 2 * LAUNCH_US


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="triton",
    variant="naive",
    summary="a row and a block of columns of each product a program; every format",
    archs=("sm_80+",),
    space={"block": (32, 64)},
    illegal=_illegal,
    program=_program,
    estimate=_estimate,
    rank=0,
)
