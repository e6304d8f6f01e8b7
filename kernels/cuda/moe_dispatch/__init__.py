"""`moe_dispatch` in CUDA C++: ll (words that are their own flags) and tiles (rings with signals).

Ranks write to each other's windows (``kernelcat/window.cuh``) and never read them. One launch
sends and takes the rows, and makes the index maps in thread blocks of their own.
"""

from __future__ import annotations

from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.expert_exchange import (
    THREADS,
    Exchange,
    row_blocks,
    tile_tokens,
    tokens_of_block,
)
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.windows import (
    FLAGGED_WORDS,
    SHARED_BYTES,
    why_not_resident,
    window_params,
)
from kernelcat.reference.all_reduce import SM_BLOCKS
from kernelcat.reference.moe_dispatch import FP8
from kernelcat.runtime.gpu import Gpu

MAX_MAP_BLOCKS, MAP_TOKENS = 32, 2 * THREADS
"""Thread blocks that make index maps, at most, and tokens for which one is enough: more of them
wait for each other's counts."""
GROUP_TOKENS, WORD_IDS = 64, 4
"""Tokens of which a flagged word says whether they come, and expert ids in one."""
MAP_ROUND_US, COUNTS_US = 1.5, 3.0
"""A thread block's two passes over the ids of as many tokens as it has threads; and its wait for
counts of the others."""


def _num_scales(problem: Problem) -> int:
    return ceil(problem["hidden"] / 128) if problem["act_dtype"] == FP8 else 0


def _wire_bytes(problem: Problem) -> int:
    """Bytes of a row as it travels, in whole vectors of 16 bytes."""
    data = problem["hidden"] * dtypes.itemsize(problem["act_dtype"])
    return int(data + 16 * ceil((_num_scales(problem) + problem["top_k"]) / 4))


def _id_words(problem: Problem) -> int:
    """Flagged words that hold the ids of a token's experts."""
    return ceil(problem["top_k"] / WORD_IDS)


def _num_groups(problem: Problem) -> int:
    return ceil(problem["ranks"] * problem["tokens"] / GROUP_TOKENS)


def _shared_bytes(problem: Problem, config: Config) -> int:
    """kernels/cuda/moe_dispatch/dispatch_rows.cuh has the same layout."""
    groups = _num_groups(problem)
    words = 2 * 4 * _num_scales(problem)
    ranks = tokens_of_block(problem, config) if tile_tokens(config) else 0
    of_rows = 8 * groups + 4 * (groups + 1) + words + ranks
    experts = problem["local_experts"]
    of_maps = 4 * (3 * (experts + 2) + 2 * (THREADS // 32) * (experts + 1))
    return int(8 * (THREADS // 32) + max(of_rows, of_maps))


def _map_blocks(problem: Problem, config: Config, gpu: Gpu) -> int:
    room = SM_BLOCKS * gpu.sms - row_blocks(problem, config)
    wanted = max(ceil(problem["ranks"] * problem["tokens"] / MAP_TOKENS), 1)
    return int(min(wanted, MAX_MAP_BLOCKS, room))


def _words(problem: Problem) -> int:
    """Flagged words of a rank: ids, who comes, and at most so many thread blocks' counts."""
    of_counts = MAX_MAP_BLOCKS * (problem["local_experts"] // 2 + 1)
    return int(_num_groups(problem) + problem["tokens"] * _id_words(problem) + of_counts)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    programmatic = has_dependent_launch(gpu)
    source = instance(
        "moe_dispatch/dispatch.cu", "moe_dispatch",
        problem["dtype"], problem["act_dtype"] == FP8, problem["ranks"], _id_words(problem),
        tile_tokens(config), THREADS, programmatic,
    )  # fmt: skip
    tensors = ("x", "expert_ids", "weights", "rows", "scale", "gates", "row_of", "source_offsets",
               "offsets", "order", "position")  # fmt: skip
    map_blocks = _map_blocks(problem, config, gpu)
    num_blocks = map_blocks + row_blocks(problem, config)
    axes = (problem[axis] for axis in ("tokens", "hidden", "top_k", "local_experts"))
    params = (*map(Pointer, tensors), *map(Int32, (*axes, map_blocks)), *window_params())
    step = Step(source, (num_blocks, 1, 1), params, THREADS, _shared_bytes(problem, config),
                programmatic=programmatic, max_carveout=True)  # fmt: skip
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_scales(problem) + problem["top_k"] > 4 * THREADS:
        return f"a row of {problem['hidden']} elements has more scales than threads hold"
    if (words := _words(problem)) > FLAGGED_WORDS:
        return f"the ids of {problem['tokens']} tokens take {words} words, not {FLAGGED_WORDS}"
    if _shared_bytes(problem, config) > SHARED_BYTES:
        return (
            f"{problem['tokens']} tokens of each rank, or {problem['local_experts']} experts, do "
            "not fit into shared memory"
        )
    return why_not_resident(row_blocks(problem, config) + 1, gpu)


def _maps_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every thread block goes over the ids of its part of the tokens."""
    map_blocks = max(_map_blocks(problem, config, gpu), 1)
    rounds = ceil(problem["ranks"] * problem["tokens"] / (THREADS * map_blocks))
    return MAP_ROUND_US * rounds + (COUNTS_US if map_blocks > 1 else 0.0)


IMPLEMENTATIONS = Exchange(
    "moe_dispatch", _program, _wire_bytes, _illegal, trips=2, beside_us=_maps_us
).implementations(
    techniques={"flags beside data": "STG*128.STRONG.SYS"},
)
