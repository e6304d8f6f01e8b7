"""`lm_head` in CUDA C++: all logits and a search, or lists of the first tokens in one launch."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import L2_TO_DRAM, LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance
from kernelcat.reference.lm_head import ENTRY, MAX_TOP_K
from kernelcat.runtime.gpu import KB, Gpu

NAIVE_THREADS = 256
MAX_GROUP, MAX_GROUPS = 16, 65535
"""Rows of x of a group, which `mma` has in shared memory; groups of a grid. Both at most."""
TILE_ROWS = 16
"""Rows of w that a warp multiplies at a time."""
VECTOR, CHUNK_VECTORS = 8, 4
"""Elements in 16 bytes; vectors of a row that a warp loads at once."""
RESIDENT_WARPS = 16
"""Warps of an SM, with 128 registers a thread."""
FOUND_BYTES = 8
"""A token in a list: its logit and its id."""

SPACE = {"warps": (4, 8, 16), "unroll": (2, 4, 8)}
"""
warps : of a thread block
unroll : vectors of 16 bytes of each of two rows that a lane has in flight
"""

LATENCY_US = 0.8
"""From a load to its value."""
INSERT_US = 0.02
"""Inserting a token into a list."""


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, vocab = problem["tokens"], problem["vocab"]
    if not tokens:
        return Program(())
    types = problem["dtype"], problem["logits_dtype"]
    scores = Step(
        instance("lm_head/naive.cu", "lm_head_scores", *types),
        (min(ceil(32 * tokens * vocab / NAIVE_THREADS), MAX_BLOCKS), 1, 1),
        (
            *map(Pointer, ("x", "w", "scores", "logits")),
            *(Int32(problem[name]) for name in ("tokens", "vocab", "hidden")),
        ),
        NAIVE_THREADS,
    )
    first = Step(
        instance("lm_head/naive.cu", "lm_head_first"),
        (tokens, 1, 1),
        (*map(Pointer, ("scores", "values", "ids")), Int32(vocab), Int32(problem["top_k"])),
        NAIVE_THREADS,
    )
    return Program((scores, first), {"scores": 4 * tokens * vocab})


def _group_tokens(problem: Problem) -> int:
    """Rows of x in shared memory: mma takes eight at a time."""
    return min(ceil(problem["tokens"] / 8) * 8, MAX_GROUP)


def _num_groups(problem: Problem) -> int:
    return ceil(problem["tokens"] / MAX_GROUP)


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of x with padded rows, or of the lists that take its place."""
    num_chunks = ceil(problem["hidden"] / (VECTOR * CHUNK_VECTORS))
    row_bytes = 16 * CHUNK_VECTORS * (num_chunks | 1)
    list_bytes = FOUND_BYTES * MAX_TOP_K * config["warps"]
    return _group_tokens(problem) * max(row_bytes, list_bytes)


def _num_blocks(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Thread blocks of a group: as many as the GPU holds at once, or one tile for each warp."""
    by_memory = (gpu.shared_bytes + KB) // (_shared_bytes(problem, config) + KB)
    residents = max(1, min(RESIDENT_WARPS // config["warps"], by_memory))
    num_tiles = ceil(problem["vocab"] / TILE_ROWS)
    num_residents = max(gpu.sms * residents // max(_num_groups(problem), 1), 1)
    return int(min(num_residents, ceil(num_tiles / config["warps"])))


def _mma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, warps, is_programmatic = problem["tokens"], config["warps"], has_dependent_launch(gpu)
    if not tokens:
        return Program(())
    num_blocks, group = _num_blocks(problem, config, gpu), _group_tokens(problem)
    num_groups = _num_groups(problem)
    types = problem["dtype"], problem["logits_dtype"]
    constants = (*types, group, warps, config["unroll"], is_programmatic)
    step = Step(
        instance("lm_head/mma.cu", "lm_head_mma", *constants),
        (num_blocks, num_groups, 1),
        (
            *map(Pointer, ("x", "w", "values", "ids", "logits", "found", "counters")),
            *(Int32(problem[name]) for name in ("tokens", "vocab", "hidden", "top_k")),
        ),
        32 * warps,
        _shared_bytes(problem, config),
        programmatic=is_programmatic,
    )
    found_bytes = FOUND_BYTES * MAX_TOP_K * num_groups * num_blocks * group
    return Program((step,), {"found": found_bytes, "counters": 4 * num_groups})


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tokens, hidden = problem["tokens"], problem["hidden"]
    if _num_groups(problem) > MAX_GROUPS:
        return f"tokens={tokens} must be at most {MAX_GROUP * MAX_GROUPS}: a grid has that many"
    if hidden % VECTOR:
        return f"hidden={hidden} must be a multiple of the {VECTOR} elements in 16 bytes"
    num_bytes = _shared_bytes(problem, config)
    if num_bytes + KB > gpu.shared_bytes:
        return f"x takes {num_bytes} of {gpu.shared_bytes} bytes of shared memory"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["warps"] * config["unroll"] < 32 and problem["vocab"] * problem["hidden"] > 1 << 24:
        return f"{config['warps']} warps with {config['unroll']} loads leave memory waiting"
    if config["unroll"] == 8 and _group_tokens(problem) > 8:
        return "lists of 16 rows leave no registers for unroll=8"
    return None


def _mma_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of tiles at the rate of the bytes in flight; then lists, and the last merge."""
    num_groups = max(_num_groups(problem), 1)
    residents = _num_blocks(problem, config, gpu) * num_groups / gpu.sms * config["warps"]
    num_tiles = ceil(problem["vocab"] / TILE_ROWS)
    waves = num_tiles * num_groups / max(residents * gpu.sms, 1)
    balance = waves / max(ceil(waves), 1)
    in_flight = residents * 32 * 2 * 16 * config["unroll"] * gpu.sms
    rate = min(0.93, in_flight / LATENCY_US * 1e6 / gpu.bandwidth) * max(balance, 0.5)
    num_inserted = problem["tokens"] * problem["top_k"] * (1 + 0.3 * max(waves, 1))
    list_us = num_inserted * INSERT_US * max(residents / 4, 1) * 0.3
    merge_us = 2 * LATENCY_US + problem["top_k"] * LATENCY_US / 2
    rate = min(rate, L2_TO_DRAM / (2 * num_groups)) if num_groups > 1 else rate  # w in L2
    return copy_us(ENTRY.bytes_moved(problem), gpu, rate) + LAUNCH_US + list_us + merge_us


IMPLEMENTATIONS = (
    baseline(
        "lm_head",
        "one warp a logit, then a search for one token after the other",
        _naive,
        lambda problem, config, gpu: (
            4 * copy_us(ENTRY.bytes_moved(problem), gpu) * max(problem["tokens"], 1)
        ),
        {"warp shuffle": "SHFL"},
    ),
    Implementation(
        entry="lm_head",
        language="cuda",
        variant="mma",
        summary="one launch: w streams into mma's registers, warps keep lists, the last one merges",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        program=_mma,
        estimate=_mma_us,
        techniques={"mma": "HMMA", "16-byte loads": "LDG*128", "votes of a warp": "VOTE"},
        rank=1,
    ),
)
