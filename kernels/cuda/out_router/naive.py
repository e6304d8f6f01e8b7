"""The baseline of `out_router`: a warp for each element of h, each row of x and each logit."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Float32, Int32, Param, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import instance, why_no_grid
from kernelcat.reference.out_router import ENTRY
from kernelcat.runtime.gpu import Gpu

THREADS = 256
"""kThreads."""


def _num_blocks(num_warps: int) -> int:
    return ceil(32 * num_warps / THREADS)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, hidden, experts = (problem[axis] for axis in ("tokens", "hidden", "experts"))

    def step(kernel: str, num_warps: int, tensors: tuple[str, ...], *numbers: Param) -> Step:
        source = instance("out_router/naive.cu", f"out_router_{kernel}", problem["dtype"])
        params = (*map(Pointer, tensors), *numbers)
        return Step(source, (_num_blocks(num_warps), 1, 1), params, THREADS)

    if not tokens * max(hidden, experts):
        return Program(())
    rows, columns = Int32(tokens), Int32(hidden)
    project = step(
        "project", tokens * hidden, ("attn", "wo", "bo", "residual"),
        rows, Int32(problem["width"]), columns,
    )  # fmt: skip
    normalize = step(
        "normalize", tokens, ("residual", "norm_weight", "x"),
        rows, columns, Float32(problem["eps"]),
    )  # fmt: skip
    route = step(
        "route", tokens * experts, ("x", "router", "router_bias", "logits"),
        rows, columns, Int32(experts),
    )  # fmt: skip
    steps = (project, normalize) if hidden else ()
    return Program((*steps, route) if experts else steps)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return why_no_grid(_num_blocks(problem["tokens"] * max(problem["hidden"], problem["experts"])))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every token reads all weights again, mostly from L2."""
    return 3 * LAUNCH_US + 4 * copy_us(max(problem["tokens"], 1) * ENTRY.bytes_moved(problem), gpu)


IMPLEMENTATION = replace(
    baseline(
        "out_router",
        "a warp for each element of h, each row of x and each logit, in three launches",
        _program,
        _estimate,
        {"fused multiply-add": "FFMA"},
    ),
    illegal=_illegal,
)
