"""`moe_dispatch` in Triton: slots, whose words are their own flags, in all ranks' windows.

Three launches: `send` sends rows and ids, `arrive` numbers the tokens that come, `receive` takes
the rows and makes the index maps. Tokens that do not fit into the slots take two more launches for
each slotful.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit import triton
from kernelcat.kernels.cuda.common.windows import (
    EPOCHS,
    SENDER_BYTES,
    TRIP_US,
    rounds_of_tokens,
    why_no_slots,
)
from kernelcat.kernels.triton.common.dependent_launch import dependent_step
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.kernels.triton.common.windows import window_arguments, wire_us
from kernelcat.reference._exchange import mean_rows
from kernelcat.reference.moe_dispatch import FP8
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.moe_dispatch.device"
CHUNK = 256
"""Tokens of one rank whose ids a program takes."""
MAX_MAP_PROGRAMS = 128
MAP_ROUND_US = 2.0
"""A program's two passes over the ids of a chunk, for one expert."""

SPACE = {"block": (512, 1024, 2048), "programs": (64, 128, 256), "warps": (4, 8)}
"""block : words of a row at once; programs : programs for rows, at most"""


def _is_float8(problem: Problem) -> bool:
    return bool(problem["act_dtype"] == FP8)


def _sizes(problem: Problem) -> dict[str, int]:
    """Words of a row: of its data, scales, and all with room up to a multiple of 64 bytes."""
    data = int(problem["hidden"] * itemsize(problem["act_dtype"]) // 4)
    scales = ceil(problem["hidden"] / 128) if _is_float8(problem) else 0
    row = 16 * ceil((data + scales + problem["top_k"]) / 16)
    return {"data_words": data, "num_scales": scales, "row_words": row}


def _chunks(problem: Problem) -> int:
    """Chunks of each rank's tokens."""
    return ceil(problem["tokens"] / CHUNK)


def _rounds(problem: Problem) -> list[tuple[int, int]]:
    """First token and number of tokens of each slotful; no tokens are one too."""
    row_bytes = 4 * _sizes(problem)["row_words"]
    return rounds_of_tokens(problem["tokens"], problem["ranks"], row_bytes) or [(0, 0)]


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    assignments = problem["ranks"] * problem["tokens"] * problem["top_k"]
    workspaces = {
        "ids": 4 * assignments,
        "numbers": 4 * problem["ranks"] * problem["tokens"],
        "counts": 4 * problem["ranks"] * _chunks(problem),
    }
    return Program(tuple(_steps(problem, config, gpu)), workspaces)


def _steps(problem: Problem, config: Config, gpu: Gpu) -> Iterator[Step]:
    for begin, count in _rounds(problem):
        yield _send(problem, config, gpu, begin, count)
        if begin == 0 and count:
            yield _arrive(problem, gpu)
        yield _receive(problem, config, gpu, begin, count)


def _axes(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    return {name: triton.integer(problem[name], divisor=1) for name in names}


def _row_arguments(problem: Problem) -> dict[str, triton.Argument]:
    return {name: triton.integer(size) for name, size in _sizes(problem).items()}


def _send(problem: Problem, config: Config, gpu: Gpu, begin: int, count: int) -> Step:
    arguments = {
        "x": triton.pointer("x", problem["dtype"] if _is_float8(problem) else "int32"),
        "expert_ids": triton.pointer("expert_ids", "int32"),
        "weights": triton.pointer("weights", "int32"),
        "begin": triton.integer(begin, divisor=1),
        "count": triton.integer(count, divisor=1),
        "num_ids": triton.integer(0 if begin else problem["tokens"] * problem["top_k"], divisor=1),
        "hidden": triton.integer(problem["hidden"]),
        **_axes(problem, "top_k", "local_experts"),
        **_row_arguments(problem),
        **window_arguments(),
    }
    constants = {
        "RANKS": problem["ranks"], "TOP_K": next_power_of_two(problem["top_k"]),
        "BLOCK": config["block"], "IS_FLOAT8": _is_float8(problem),
    }  # fmt: skip
    grid = (min(max(count, 1), config["programs"]), 1, 1)
    return dependent_step(
        gpu, f"{KERNELS}:send", grid, arguments, constants, num_warps=config["warps"]
    )


def _arrive(problem: Problem, gpu: Gpu) -> Step:
    arguments = {
        **{name: triton.pointer(name, "int32") for name in ("ids", "numbers", "counts")},
        **_axes(problem, "tokens"),
        "chunks": triton.integer(_chunks(problem), divisor=1),
        **_axes(problem, "top_k", "local_experts"),
        **window_arguments(),
    }
    constants = {"TOP_K": next_power_of_two(problem["top_k"]), "CHUNK": CHUNK}
    grid = (problem["ranks"] * _chunks(problem), 1, 1)
    return dependent_step(gpu, f"{KERNELS}:arrive", grid, arguments, constants, num_warps=8)


def _receive(problem: Problem, config: Config, gpu: Gpu, begin: int, count: int) -> Step:
    words = ("rows", "scale", "gates", "row_of", "source_offsets", "offsets", "order", "position",
             "ids", "numbers", "counts")  # fmt: skip
    map_programs = min(problem["local_experts"], MAX_MAP_PROGRAMS) if begin == 0 else 0
    sizes = _sizes(problem)
    arguments = {
        **{name: triton.pointer(name, "int32") for name in words},
        "begin": triton.integer(begin, divisor=1),
        "count": triton.integer(count, divisor=1),
        **_axes(problem, "tokens"),
        "chunks": triton.integer(_chunks(problem), divisor=1),
        **_axes(problem, "top_k", "local_experts"),
        **_row_arguments(problem),
        "map_programs": triton.integer(map_programs, divisor=1),
        **window_arguments(),
    }
    constants = {
        "RANKS": problem["ranks"], "TOP_K": next_power_of_two(problem["top_k"]),
        "TAIL": next_power_of_two(sizes["num_scales"] + problem["top_k"]), "CHUNK": CHUNK,
        "CHUNKS": next_power_of_two(max(problem["ranks"] * _chunks(problem), 1)),
        "BLOCK": config["block"], "IS_FLOAT8": _is_float8(problem),
    }  # fmt: skip
    grid = (map_programs + min(max(count, 1), config["programs"]), 1, 1)
    return dependent_step(
        gpu, f"{KERNELS}:receive", grid, arguments, constants, num_warps=config["warps"]
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    words = problem["tokens"] * problem["top_k"] + 1
    if 8 * words > SENDER_BYTES:
        return f"the ids of {problem['tokens']} tokens take {words} words: too many for a window"
    assert max(SPACE["programs"]) + MAX_MAP_PROGRAMS <= EPOCHS
    return why_no_slots(problem["ranks"], 4 * _sizes(problem)["row_words"])


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    received = mean_rows(problem) * 4 * _sizes(problem)["row_words"]
    sent = received * (problem["ranks"] - 1) / problem["ranks"]
    wire = wire_us(sent, min(problem["tokens"], config["programs"]))
    experts = ceil(problem["local_experts"] / MAX_MAP_PROGRAMS)
    maps = MAP_ROUND_US * problem["ranks"] * _chunks(problem) * experts
    launches = 1 + 2 * len(_rounds(problem))
    beside = launches * LAUNCH_US + 2 * TRIP_US
    return beside + max(wire, maps, copy_us(int(6 * received), gpu))


IMPLEMENTATIONS = (
    Implementation(
        entry="moe_dispatch",
        language="triton",
        variant="slots",
        summary="a slot for each token, whose words are their own flags; three launches",
        archs=("sm_89+",),
        space=SPACE,
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        techniques={"words that arrive": "LDG*128.STRONG.SYS"},
        rank=0,
        unverified="two problems are right on two GPUs, a whole check did not end in 110 s",
    ),
)
