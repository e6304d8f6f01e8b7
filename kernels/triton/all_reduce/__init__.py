"""`all_reduce` in Triton: slots, whose words are their own flags, in all ranks' windows.

What does not fit into the slots takes several launches, and the norm is one more.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.cuda.common.windows import HALF_BYTES, TRIP_US
from kernelcat.kernels.triton.common.dependent_launch import dependent_step
from kernelcat.kernels.triton.common.windows import why_not_resident, window_arguments, wire_us
from kernelcat.runtime.gpu import Gpu

SUMS = "kernelcat.kernels.triton.all_reduce.device:slots"
NORM = "kernelcat.kernels.triton.all_reduce.device:normalize"
MAX_NORM_HIDDEN = 32768

SPACE = {"block": (512, 1024, 2048), "programs": (64, 128, 256), "warps": (4, 8)}
"""block : words of a program at once; programs : programs at most"""


def _num_words(problem: Problem) -> int:
    return int(problem["tokens"] * problem["hidden"] // 2)


def _slot_words(problem: Problem) -> int:
    """Words that each rank sends in one launch, at most: a multiple of 64 bytes."""
    return HALF_BYTES // (64 * problem["ranks"]) * 16


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_words = _num_words(problem)
    if num_words == 0:
        return Program(())
    at_once = _slot_words(problem)
    rounds = range(0, num_words, at_once)
    steps = [_sums(problem, config, gpu, begin, min(at_once, num_words - begin))
             for begin in rounds]  # fmt: skip
    return Program((*steps, *([_norm(problem, gpu)] if problem["norm"] else [])))


def _sums(problem: Problem, config: Config, gpu: Gpu, begin: int, num_words: int) -> Step:
    """The launch that sums up ``num_words`` words from ``begin`` on."""
    arguments = {
        **{name: triton.pointer(name, "int32") for name in ("x", "residual", "out")},
        "begin": triton.integer(begin, divisor=16),
        "num_words": triton.integer(num_words),
        "slot_words": triton.integer(_slot_words(problem)),
        **window_arguments(),
    }
    constants = {
        "RANKS": problem["ranks"], "BLOCK": config["block"],
        "IS_BFLOAT16": problem["dtype"] == "bfloat16", "HAS_RESIDUAL": problem["residual"],
    }  # fmt: skip
    num_programs = min(ceil(num_words / config["block"]), config["programs"])
    return dependent_step(
        gpu, SUMS, (num_programs, 1, 1), arguments, constants, num_warps=config["warps"]
    )


def _norm(problem: Problem, gpu: Gpu) -> Step:
    """The launch that normalizes the rows of out."""
    dtype, hidden = problem["dtype"], problem["hidden"]
    arguments = {
        "h": triton.pointer("out", dtype),
        "weight": triton.pointer("weight", dtype),
        "normed": triton.pointer("normed", dtype),
        "hidden": triton.integer(hidden),
        "eps": triton.real(problem["eps"]),
    }
    columns = {"COLS": 1 << (hidden - 1).bit_length()}
    return dependent_step(gpu, NORM, (problem["tokens"], 1, 1), arguments, columns, num_warps=4)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["tokens"] * problem["hidden"] % 2:
        return "tokens * hidden must be even: a word holds two elements"
    if problem["norm"] and problem["hidden"] > MAX_NORM_HIDDEN:
        return f"a program normalizes rows of at most {MAX_NORM_HIDDEN} elements"
    return why_not_resident(config["programs"], gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    size = 4 * _num_words(problem)
    programs = min(max(ceil(_num_words(problem) / config["block"]), 1), config["programs"])
    wire = wire_us((problem["ranks"] - 1) * size, programs)
    return LAUNCH_US + max(wire, copy_us(2 * size, gpu)) + 2 * TRIP_US


IMPLEMENTATIONS = (
    Implementation(
        entry="all_reduce",
        language="triton",
        variant="slots",
        summary="words that are their own flags, in slots of all windows; the norm is a launch",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        techniques={"words that arrive": "LDG*128.STRONG.SYS"},
        rank=0,
    ),
)
