"""`moe_combine` in CUDA C++: ll (words that are their own flags) and tiles (rings with signals).

Ranks write to each other's windows (``kernelcat/window.cuh``) and never read them.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.windows import (
    HALF_BYTES,
    RING_TILES,
    SHARED_BYTES,
    TRIP_US,
    why_not_resident,
    window_params,
    wire_us,
)
from kernelcat.reference._exchange import mean_rows
from kernelcat.runtime.gpu import Gpu

UNVERIFIED = "its first version was right on two H200, this one has not run there"
THREADS = 256
"""Threads of a thread block."""

LL_SPACE = {"blocks": (64, 128, 256)}
TILE_SPACE = {"tile_tokens": (1, 2, 4), "blocks": (32, 64, 128, 256)}
"""tile_tokens : tokens of a tile; blocks : thread blocks at most"""


def _launch(
    problem: Problem, kernel: str, num_blocks: int, gpu: Gpu, shared_bytes: int, *more: int
) -> Program:
    """A launch; ``more`` are further sizes that the kernel takes."""
    if problem["tokens"] == 0:
        return Program(())
    programmatic = has_dependent_launch(gpu)
    source = instance(
        f"moe_combine/{kernel}.cu", f"moe_combine_{kernel}",
        problem["dtype"], problem["ranks"], THREADS, programmatic,
    )  # fmt: skip
    tensors = ("sums", "row_of", "expert_ids", "residual", "out")
    axes = (problem[axis] for axis in ("tokens", "hidden", "top_k", "local_experts"))
    sizes = map(Int32, (*axes, *more))
    params = (*map(Pointer, tensors), *sizes, *window_params())
    step = Step(source, (num_blocks, 1, 1), params, THREADS, shared_bytes,
                programmatic=programmatic)  # fmt: skip
    return Program((step,))


def _ll(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks = min(problem["tokens"], config["blocks"])
    return _launch(problem, "ll", 1 + num_blocks, gpu, 0)


def _tiles(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks, shared_bytes = _num_tile_blocks(problem, config), _shared_bytes(problem, config)
    return _launch(problem, "tiles", num_blocks, gpu, shared_bytes, config["tile_tokens"])


def _num_tile_blocks(problem: Problem, config: Config) -> int:
    return int(min(max(ceil(problem["tokens"] / config["tile_tokens"]), 1), config["blocks"]))


def _shared_bytes(problem: Problem, config: Config) -> int:
    """The ranks of each token of a thread block, and its rows on all ranks."""
    per_round = _num_tile_blocks(problem, config) * config["tile_tokens"]
    tokens = config["tile_tokens"] * ceil(problem["tokens"] / per_round)
    return int(tokens * (4 * problem["ranks"] + 1))


def _ll_illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    slots = problem["ranks"] * problem["tokens"] * problem["hidden"] * 2
    if slots > HALF_BYTES:
        return f"slots of {slots} bytes do not fit into a window"
    return why_not_resident(1 + config["blocks"], gpu)


def _tiles_illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile_bytes = config["tile_tokens"] * problem["hidden"] * 2
    if config["blocks"] * problem["ranks"] * RING_TILES * tile_bytes > HALF_BYTES:
        return "rings of tiles do not fit into a window: fewer blocks or smaller tiles"
    if _shared_bytes(problem, config) > SHARED_BYTES:
        return f"the rows of {problem['tokens']} tokens do not fit into shared memory: more blocks"
    return why_not_resident(config["blocks"], gpu)


def _exchange_us(problem: Problem, config: Config, gpu: Gpu, trips: int) -> float:
    """The longer of the wire and of the local memory, and trips."""
    received = mean_rows(problem) * problem["hidden"] * 2
    sent = received * (problem["ranks"] - 1) / problem["ranks"]
    blocks = max(min(problem["tokens"], config["blocks"]), 1)
    return LAUNCH_US + max(wire_us(sent, blocks), copy_us(4 * received, gpu)) + trips * TRIP_US


def _ll_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _exchange_us(problem, config, gpu, 1)


def _tiles_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _exchange_us(problem, config, gpu, 2) + 0.1 * config["tile_tokens"]


IMPLEMENTATIONS = (
    Implementation(
        entry="moe_combine",
        language="cuda",
        variant="tiles",
        summary="sums travel in rings of tiles, with a signal for each tile",
        archs=("sm_80+",),
        space=TILE_SPACE,
        illegal=_tiles_illegal,
        program=_tiles,
        estimate=_tiles_us,
        techniques={
            "system-scope release": "STG.E.64.STRONG.SYS",
            "system-scope acquire": "LDG.E.64.STRONG.SYS",
        },
        rank=0,
        unverified=UNVERIFIED,
    ),
    Implementation(
        entry="moe_combine",
        language="cuda",
        variant="ll",
        summary="low latency: a slot for each token, whose words are their own flags",
        archs=("sm_80+",),
        space=LL_SPACE,
        illegal=_ll_illegal,
        program=_ll,
        estimate=_ll_us,
        techniques={"words that arrive": "STG*128.STRONG.SYS"},
        rank=1,
        unverified=UNVERIFIED,
    ),
)
