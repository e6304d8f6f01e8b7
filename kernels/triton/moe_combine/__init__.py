"""`moe_combine` in Triton: slots, whose words are their own flags, in all ranks' windows.

Tokens that do not fit into the slots take several launches.
"""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.cuda.common.windows import TRIP_US, rounds_of_tokens, why_no_slots
from kernelcat.kernels.triton.common.dependent_launch import dependent_step
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.kernels.triton.common.windows import (
    why_not_resident,
    window_arguments,
    wire_us,
)
from kernelcat.reference._exchange import mean_rows
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.moe_combine.device:combine"

SPACE = {"block": (512, 1024, 2048), "programs": (64, 128, 256), "warps": (4, 8)}
"""block : words of a program at once; programs : programs at most"""


def _words(problem: Problem) -> int:
    return int(problem["hidden"] // 2)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rounds = rounds_of_tokens(problem["tokens"], problem["ranks"], 4 * _words(problem))
    return Program(tuple(_round(problem, config, gpu, *part) for part in rounds))


def _round(problem: Problem, config: Config, gpu: Gpu, begin: int, count: int) -> Step:
    """The launch for ``count`` tokens of every rank from ``begin`` on."""
    arguments = {
        **{name: triton.pointer(name, "int32")
           for name in ("sums", "row_of", "expert_ids", "residual", "out")},
        "begin": triton.integer(begin, divisor=1),
        "count": triton.integer(count, divisor=1),
        "tokens": triton.integer(problem["tokens"], divisor=1),
        "words": triton.integer(_words(problem)),
        "top_k": triton.integer(problem["top_k"], divisor=1),
        "local_experts": triton.integer(problem["local_experts"], divisor=1),
        **window_arguments(),
    }  # fmt: skip
    constants = {
        "RANKS": problem["ranks"], "TOP_K": next_power_of_two(problem["top_k"]),
        "BLOCK": config["block"], "IS_BFLOAT16": problem["dtype"] == "bfloat16",
        "HAS_RESIDUAL": problem["residual"],
    }  # fmt: skip
    grid = (min(count, config["programs"]), 1, 1)
    return dependent_step(gpu, KERNEL, grid, arguments, constants, num_warps=config["warps"])


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    reason = why_no_slots(problem["ranks"], 4 * _words(problem))
    return reason or why_not_resident(config["programs"], gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    received = mean_rows(problem) * 4 * _words(problem)
    sent = received * (problem["ranks"] - 1) / problem["ranks"]
    wire = wire_us(sent, min(problem["tokens"], config["programs"]))
    rounds = len(rounds_of_tokens(problem["tokens"], problem["ranks"], 4 * _words(problem)))
    beside = rounds * (LAUNCH_US + 2 * TRIP_US)
    return beside + max(wire, copy_us(int(4 * received), gpu))


IMPLEMENTATIONS = (
    Implementation(
        entry="moe_combine",
        language="triton",
        variant="slots",
        summary="a slot for each token, whose words are their own flags",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        techniques={"words that arrive": "LDG*128.STRONG.SYS"},
        rank=0,
    ),
)
