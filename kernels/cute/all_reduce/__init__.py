"""`all_reduce` in CuTe DSL: slots (words that are their own flags; residual and RMSNorm).

Rows that do not fit into the slots take several launches.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.common.windows import (
    TRIP_US,
    rounds_of_tokens,
    why_not_resident,
    window_params,
    wire_us,
)
from kernelcat.kernels.cute.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cute.common.exchange import WINDOW_KINDS
from kernelcat.runtime.gpu import Gpu

THREADS, VECTOR, MAX_HIDDEN = 256, 8, 16384
"""Threads of a thread block, elements in 16 bytes, and elements of the longest row."""


def _rounds(problem: Problem) -> list[tuple[int, int]]:
    """First token and number of tokens of each launch."""
    return rounds_of_tokens(problem["tokens"], problem["ranks"], 2 * problem["hidden"])


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["tokens"] * problem["hidden"] == 0:
        return Program(())
    steps = (_step(problem, config, gpu, *part) for part in _rounds(problem))
    return Program(tuple(steps))


def _step(problem: Problem, config: Config, gpu: Gpu, begin: int, count: int) -> Step:
    constants = (
        ("dtype", problem["dtype"]), ("ranks", problem["ranks"]), ("threads", THREADS),
        ("vectors", ceil(problem["hidden"] / (VECTOR * THREADS))),
        ("residual", problem["residual"]), ("norm", problem["norm"]),
        ("programmatic", has_dependent_launch(gpu)),
    )  # fmt: skip
    kinds = (*("*uint32",) * 5, *("int32",) * 4, "float32", "int32", *WINDOW_KINDS)
    source = CuteSource("all_reduce.slots:Slots", kinds, constants)
    num_ctas = min(count, config["blocks"])
    tensors = map(Pointer, ("x", "residual", "weight", "out", "normed"))
    sizes = map(Int32, (problem["tokens"], problem["hidden"], begin, count))
    params = (*tensors, *sizes, Float32(problem["eps"]), Int32(num_ctas), *window_params())
    return Step(source, (num_ctas, 1, 1), params, block=THREADS)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["hidden"] % VECTOR or problem["hidden"] > MAX_HIDDEN:
        return f"hidden must be a multiple of {VECTOR}, and at most {MAX_HIDDEN}"
    return why_not_resident(config["blocks"], gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    size = 2 * problem["tokens"] * problem["hidden"]
    wire = wire_us((problem["ranks"] - 1) * size, max(min(problem["tokens"], config["blocks"]), 1))
    num_launches = max(len(_rounds(problem)), 1)
    return num_launches * (LAUNCH_US + TRIP_US) + max(wire, copy_us(2 * size, gpu))


IMPLEMENTATIONS = (
    Implementation(
        entry="all_reduce",
        language="cute",
        variant="slots",
        summary="a slot for each row, whose words are their own flags; residual and RMSNorm",
        archs=("sm_80+",),
        space={"blocks": (64, 128, 256)},
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        techniques={"words that arrive": "LDG*128.STRONG.SYS"},
        rank=0,
    ),
)
