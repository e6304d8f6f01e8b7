"""`moe_dispatch` in CuTe DSL: slots, whose words are their own flags, in all ranks' windows.

Three launches: `send` sends ids and rows, `arrive` numbers the tokens that come, `receive` takes
the rows and makes the index maps. Tokens that do not fit into the slots take two more launches for
each slotful.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.dtypes import itemsize
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.common.windows import (
    SENDER_BYTES,
    TRIP_US,
    rounds_of_tokens,
    window_params,
    wire_us,
)
from kernelcat.kernels.cute.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cute.common.exchange import WINDOW_KINDS
from kernelcat.reference._exchange import mean_rows
from kernelcat.reference.moe_dispatch import FP8
from kernelcat.runtime.gpu import Gpu

THREADS, CHUNK, MAX_HIDDEN = 256, 32, 16384
"""Threads of a thread block, tokens of a chunk, and elements of the longest row."""
MAX_MAP_CTAS = 256
"""Thread blocks that make index maps, at most; each of their warps has an expert."""
MAP_CHUNK_US = 0.8
"""A warp's two passes over the ids of a chunk."""


def _is_float8(problem: Problem) -> bool:
    return bool(problem["act_dtype"] == FP8)


def _data_vectors(problem: Problem) -> int:
    """Vectors of 16 bytes of a row's activations."""
    return int(problem["hidden"] * itemsize(problem["act_dtype"]) // 16)


def _num_scales(problem: Problem) -> int:
    return ceil(problem["hidden"] / 128) if _is_float8(problem) else 0


def _row_words(problem: Problem) -> int:
    """Words of a row on the wire, in whole vectors."""
    tail = ceil((_num_scales(problem) + problem["top_k"]) / 4)
    return 4 * (_data_vectors(problem) + tail)


def _chunks(problem: Problem) -> int:
    return ceil(problem["tokens"] / CHUNK)


def _map_ctas(problem: Problem) -> int:
    return ceil(problem["local_experts"] * 32 / THREADS)


def _rounds(problem: Problem) -> list[tuple[int, int]]:
    """First token and number of tokens of each slotful."""
    return rounds_of_tokens(problem["tokens"], problem["ranks"], 4 * _row_words(problem))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    rows = problem["ranks"] * problem["tokens"]
    workspaces = {
        "ids": 4 * rows * problem["top_k"],
        "numbers": 4 * rows,
        "counts": 4 * problem["ranks"] * _chunks(problem),
    }
    return Program(tuple(_steps(problem, config, gpu)), workspaces)


def _steps(problem: Problem, config: Config, gpu: Gpu) -> Iterator[Step]:
    if problem["tokens"] == 0:
        yield _receive(problem, config, gpu, 0, 0)
    for begin, count in _rounds(problem):
        yield _send(problem, config, gpu, begin, count)
        if begin == 0:
            yield _arrive(problem, gpu)
        yield _receive(problem, config, gpu, begin, count)


def _constants(problem: Problem, gpu: Gpu) -> dict[str, int | str | bool]:
    return {
        "ranks": problem["ranks"], "top_k": problem["top_k"],
        "programmatic": has_dependent_launch(gpu),
    }  # fmt: skip


def _row_constants(problem: Problem, gpu: Gpu) -> dict[str, int | str | bool]:
    vectors = max(ceil(_data_vectors(problem) / THREADS), 1)
    return {"threads": THREADS, "vectors": vectors, **_constants(problem, gpu)}


def _send(problem: Problem, config: Config, gpu: Gpu, begin: int, count: int) -> Step:
    num_ctas = min(count, config["blocks"])
    num_ids = 0 if begin else problem["tokens"] * problem["top_k"]
    sizes = (problem["tokens"], problem["hidden"], problem["local_experts"], _row_words(problem),
             begin, count, num_ids, num_ctas)  # fmt: skip
    kinds = ("*uint32", "*int32", "*float32", *("int32",) * len(sizes), *WINDOW_KINDS)
    constants = {"dtype": problem["dtype"], "float8": _is_float8(problem),
                 **_row_constants(problem, gpu)}  # fmt: skip
    source = CuteSource("moe_dispatch.send:Send", kinds, tuple(constants.items()))
    tensors = map(Pointer, ("x", "expert_ids", "weights"))
    params = (*tensors, *map(Int32, sizes), *window_params())
    return Step(source, (num_ctas, 1, 1), params, block=THREADS)


def _arrive(problem: Problem, gpu: Gpu) -> Step:
    sizes = (problem["tokens"], _chunks(problem), problem["local_experts"])
    kinds = (*("*int32",) * 3, *("int32",) * len(sizes), *WINDOW_KINDS)
    constants = tuple(_constants(problem, gpu).items())
    source = CuteSource("moe_dispatch.arrive:Arrive", kinds, constants)
    params = (*map(Pointer, ("ids", "numbers", "counts")), *map(Int32, sizes), *window_params())
    grid = (problem["ranks"] * _chunks(problem), 1, 1)
    return Step(source, grid, params, block=CHUNK)


def _receive(problem: Problem, config: Config, gpu: Gpu, begin: int, count: int) -> Step:
    map_ctas = 0 if begin else _map_ctas(problem)
    num_ctas = map_ctas + min(max(count, 1), config["blocks"])
    sizes = (problem["tokens"], _chunks(problem), problem["local_experts"],
             _data_vectors(problem), _num_scales(problem), _row_words(problem), begin,
             count, map_ctas, num_ctas)  # fmt: skip
    kinds = (*("*uint32",) * 3, *("*int32",) * 8, *("int32",) * len(sizes), *WINDOW_KINDS)
    constants = tuple(_row_constants(problem, gpu).items())
    source = CuteSource("moe_dispatch.receive:Receive", kinds, constants)
    tensors = ("rows", "scale", "gates", "row_of", "source_offsets", "offsets", "order", "position",
               "ids", "numbers", "counts")  # fmt: skip
    params = (*map(Pointer, tensors), *map(Int32, sizes), *window_params())
    return Step(source, (num_ctas, 1, 1), params, block=THREADS)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["hidden"] > MAX_HIDDEN:
        return f"rows of {problem['hidden']} elements are longer than {MAX_HIDDEN}"
    if _map_ctas(problem) > MAX_MAP_CTAS:
        return f"{problem['local_experts']} experts of a rank need {_map_ctas(problem)} blocks"
    if 8 * (1 + problem["tokens"] * problem["top_k"]) > SENDER_BYTES:
        return f"the ids of {problem['tokens']} tokens do not fit into a window"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    received = mean_rows(problem) * 4 * _row_words(problem)
    sent = received * (problem["ranks"] - 1) / problem["ranks"]
    wire = wire_us(sent, max(min(problem["tokens"], config["blocks"]), 1))
    maps = MAP_CHUNK_US * problem["ranks"] * _chunks(problem)
    num_launches = 1 + 2 * max(len(_rounds(problem)), 1)
    return num_launches * LAUNCH_US + 2 * TRIP_US + max(wire, maps, copy_us(int(6 * received), gpu))


IMPLEMENTATIONS = (
    Implementation(
        entry="moe_dispatch",
        language="cute",
        variant="slots",
        summary="a slot for each token, whose words are their own flags; three launches",
        archs=("sm_89+",),
        space={"blocks": (64, 128, 256)},
        illegal=_illegal,
        program=_program,
        estimate=_estimate,
        techniques={"words that arrive": "LDG*128.STRONG.SYS"},
        rank=0,
    ),
)
