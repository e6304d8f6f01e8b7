"""`moe_mlp` for few tokens: no token is moved to its expert, and weights are read once.

Three launches, each of which starts while the one before still runs: the selection of experts, the
first product, and the second product with the weighted sum.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.composition import composed
from kernelcat.catalog.cost_model import LAUNCH_US, why_slower
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.architectures import HOPPER
from kernelcat.kernels.triton.common.dependent_launch import dependent
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.kernels.triton.common.product import illegal_stages
from kernelcat.kernels.triton.moe_mlp import grouped
from kernelcat.kernels.triton.moe_mlp.operands import (
    constants,
    pointers,
    route,
    routing_workspaces,
    sizes,
    weights,
    why_not_routed,
)
from kernelcat.reference._assignments import active
from kernelcat.reference._experts import FP4, FP8, weight_bytes
from kernelcat.reference._moe_parts import is_empty, num_assignments
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.moe_mlp.few_device:"
MAX_TOKENS = 16
"""Columns of a product at most."""
MIN_COLUMNS = 8
"""The least that an instruction of tensor cores multiplies."""
WARPS = 4
"""Warps of a program: a warpgroup multiplies 64 rows of weights at a time."""
RESERVED_BYTES = 4096
"""Shared memory of a program besides its stages."""
SPACE = {
    "first_rows": (64, 128),
    "second_rows": (64, 128),
    "split_k": (1, 2, 4),
    "stages": (4, 3, 6),
}
"""
first_rows, second_rows : rows of W1 and of W2 that a program multiplies
split_k : programs that share rows of W2, each with a part of the columns
stages : k-blocks of weights and activations on their way from memory
"""


def _block_k(problem: Problem) -> int:
    """Columns of a k-block: a block of float8's scales, and about 128 bytes of other weights."""
    return 128 if problem["format"] in ("fp8", *FP4) else 64


def _block_t(problem: Problem) -> int:
    """Columns of a product, of which the first ones are tokens."""
    return max(MIN_COLUMNS, next_power_of_two(problem["tokens"]))


def _constants(problem: Problem, rows: int, stages: int) -> dict[str, ConfigValue]:
    return {
        **constants(problem),
        "BLOCK_T": _block_t(problem),
        "SLOTS": next_power_of_two(problem["top_k"]),
        "DEPENDENT": False,
        "BLOCK_N": rows,
        "BLOCK_K": _block_k(problem),
        "STAGES": stages,
    }


def _tokens(problem: Problem) -> dict[str, triton.Argument]:
    return {"tokens": triton.integer(problem["tokens"], divisor=1)}


def _first(problem: Problem, config: Config) -> Step:
    rows = config["first_rows"]
    return triton.step(
        KERNELS + "first",
        (ceil(2 * problem["inter"] / rows), num_assignments(problem), 1),
        pointers(problem, "x") | weights(problem, 1) | pointers(problem, "ids", "h")
        | _tokens(problem) | sizes(problem, 1),
        {**_constants(problem, rows, config["stages"]), "ACTIVATION": problem["activation"]},
        num_warps=WARPS,
    )  # fmt: skip


def _depth(problem: Problem, config: Config) -> int:
    """Columns of W2 of a split, a multiple of a k-block."""
    block_k = _block_k(problem)
    return block_k * ceil(problem["inter"] / (block_k * config["split_k"]))


def _second(problem: Problem, config: Config) -> Step:
    rows, splits = config["second_rows"], config["split_k"]
    return triton.step(
        KERNELS + "second",
        (ceil(problem["hidden"] / rows), num_assignments(problem), splits),
        pointers(problem, "h") | weights(problem, 2)
        | pointers(problem, "ids", "gates", "residual", "y", "arrivals", "out")
        | _tokens(problem) | {"depth": triton.integer(_depth(problem, config))} | sizes(problem, 2),
        {
            **_constants(problem, rows, config["stages"]),
            "HAS_RESIDUAL": problem["residual"],
            "SPLITS": splits,
        },
        num_warps=WARPS,
    )  # fmt: skip


def _workspaces(problem: Problem, config: Config) -> dict[str, int]:
    rows, hidden = num_assignments(problem), problem["hidden"]
    return {
        **routing_workspaces(problem),
        "h": rows * problem["inter"] * itemsize(problem["dtype"]),
        "y": 4 * config["split_k"] * rows * hidden,
        "arrivals": 4 * ceil(hidden / config["second_rows"]),
    }


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    workspaces = _workspaces(problem, config)
    second = _second(problem, config)
    if problem["inter"] == 0:  # the second product may not begin before the routing's end
        return composed(route(problem), Program((second,)), workspaces=workspaces)
    steps = (_first(problem, config), second)
    return dependent(composed(route(problem), Program(steps), workspaces=workspaces))


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if (why := why_not_routed(problem)) or is_empty(problem):
        return why
    if problem["tokens"] > MAX_TOKENS:
        return f"tokens={problem['tokens']} are more than the {MAX_TOKENS} columns of a product"
    if problem["act_dtype"] == FP8 and problem["format"] in FP4:
        return "float8 activations are multiplied by float8 weights only, not by 4-bit weights"
    rows = max(config["first_rows"], config["second_rows"])
    program_bytes = config["stages"] * _stage_bytes(problem, rows) + RESERVED_BYTES
    return illegal_stages(config["stages"], program_bytes, gpu)


def _stage_bytes(problem: Problem, rows: int) -> int:
    """Shared memory of a k-block of ``rows`` rows of weights, their scales, and activations."""
    block_k = _block_k(problem)
    w_bytes = weight_bytes(problem.values, rows, block_k) + 4 * rows
    return w_bytes + 2 * _block_t(problem) * block_k


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_programs = active(problem) * ceil(problem["hidden"] / config["second_rows"])
    if config["split_k"] > 1 and num_programs >= 4 * gpu.sms:
        return f"{num_programs} programs fill {gpu.sms} SMs without split_k={config['split_k']}"
    if config["split_k"] * 2 * _block_k(problem) > max(problem["inter"], 1):
        return f"inter={problem['inter']} is too short for split_k={config['split_k']}"
    return why_slower(_estimate(problem, config, gpu), grouped.IMPLEMENTATION, problem, gpu)


# ---- estimate ------------------------------------------------------------------------------------

START_US = 4.0
"""The selection of experts, and the first weights of both products."""
COMBINE_US = 1.5
LATENCY_US = 1.0
"""From the start of a copy to its data, when all SMs copy."""
PROGRAMS_PER_SM = 4
"""Programs that an SM has registers for, about."""
BANDWIDTH = 0.88
"""Share of the peak bandwidth that weights reach."""
TILE_CYCLES = {"fp4": 280, "fp8": 220, "float8": 70, "16 bits": 70}
"""Issue slots of a scheduler for 16 x 64 weights: copies, decoding, products. ``float8`` are float8
weights with float8 activations."""


def _tile_cycles(problem: Problem) -> int:
    if problem["format"] in FP4:
        return TILE_CYCLES["fp4"]
    if problem["format"] == "fp8":
        return TILE_CYCLES["float8" if problem["act_dtype"] == FP8 else "fp8"]
    return TILE_CYCLES["16 bits"]


def _product_us(
    problem: Problem, n: int, k: int, rows: int, splits: int, stages: int, gpu: Gpu
) -> float:
    """The time of the SM with the most programs: bandwidth, latency, or issue slots."""
    if n * k == 0:
        return 0.0
    num_programs = active(problem) * ceil(n / rows) * splits
    per_sm = ceil(num_programs / gpu.sms)
    stage_bytes = weight_bytes(problem.values, rows, _block_k(problem))
    in_flight = min(per_sm, PROGRAMS_PER_SM) * (stages - 1) * stage_bytes
    rate = min(BANDWIDTH * gpu.bandwidth / gpu.sms * 1e-6, in_flight / LATENCY_US)  # bytes an us
    copy_us = per_sm * weight_bytes(problem.values, rows, ceil(k / splits)) / rate
    tiles = per_sm * rows / 16 * ceil(k / splits / 64)
    issue_us = tiles / 4 * _tile_cycles(problem) / 1500
    return float(max(copy_us, issue_us))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    if is_empty(problem):
        return LAUNCH_US
    hidden, inter, stages = problem["hidden"], problem["inter"], config["stages"]
    first_us = _product_us(problem, 2 * inter, hidden, config["first_rows"], 1, stages, gpu)
    second_us = _product_us(
        problem, hidden, inter, config["second_rows"], config["split_k"], stages, gpu
    )
    return LAUNCH_US + START_US + first_us + second_us + COMBINE_US


IMPLEMENTATION = Implementation(
    entry="moe_mlp",
    language="triton",
    variant="few",
    summary="for few tokens: weights stream to tensor cores once for all tokens of an expert",
    archs=HOPPER,
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "wgmma": "HGMMA",
        "asynchronous copies": "LDGSTS",
        "dependent launch": "ACQBULK",
    },
    rank=2,
)
