"""The baseline of `moe_mlp`: one warp for each element of both products, for every format."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance
from kernelcat.kernels.cuda.moe_gemm.operands import weight_format
from kernelcat.kernels.cuda.moe_mlp.operands import (
    gating,
    route_step,
    routing_workspaces,
    weights,
    why_not_routed,
)
from kernelcat.reference._moe_parts import is_empty, num_assignments
from kernelcat.reference.moe_mlp import ENTRY
from kernelcat.runtime.gpu import Gpu

WARPS = 8
FLOPS = 0.2e12
"""Operations a second, a guess from the baselines of gemm and nvfp4_matmul."""


def _product(problem: Problem, name: str, num_elements: int, params: tuple) -> Step:
    arguments = (problem["dtype"], problem["act_dtype"], weight_format(problem))
    last = (gating(problem),) if name == "first" else ()
    source = instance(
        "moe_mlp/naive.cu",
        f"moe_mlp_naive_{name}",
        *(*arguments, problem["packing"] == "tiles", *last),
    )
    sizes = (Int32(problem[axis]) for axis in ("tokens", "top_k", "hidden", "inter"))
    num_blocks = min(ceil(num_elements / WARPS), MAX_BLOCKS)
    return Step(source, (num_blocks, 1, 1), (*params, *sizes), WARPS * 32)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    num_h = num_assignments(problem) * problem["inter"]
    first = (Pointer("x"), *weights(1), Pointer("ids"), Pointer("h"))
    second = (Pointer("h"), *weights(2), *map(Pointer, ("ids", "gates", "residual", "out")))
    steps = [route_step(problem, programmatic=False)]
    if num_h:
        steps.append(_product(problem, "first", num_h, first))
    steps.append(_product(problem, "second", problem["tokens"] * problem["hidden"], second))
    workspaces = {**routing_workspaces(problem), "h": num_h * itemsize(problem["dtype"])}
    return Program(tuple(steps), workspaces)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    us = copy_us(ENTRY.bytes_moved(problem), gpu) + ENTRY.flops(problem) / FLOPS * 1e6
    return us + 2 * LAUNCH_US


IMPLEMENTATION = replace(
    baseline(
        "moe_mlp",
        "one warp for each element of both products; every format",
        _program,
        _estimate,
        {"fused multiply-add": "FFMA"},
    ),
    illegal=lambda config, problem, gpu: why_not_routed(problem),
)
