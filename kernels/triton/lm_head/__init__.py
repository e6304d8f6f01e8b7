"""`lm_head` in Triton: all logits and a search (naive), or the first tokens of tiles, merged.

`tiled` multiplies up to 64 rows of x at a time, `wide` 128 or 256: w is then read once where
`tiled` reads it again for every 64 rows.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference.lm_head import ENTRY
from kernelcat.runtime.gpu import Gpu

DEVICE = "kernelcat.kernels.triton.lm_head.device"
NAIVE_BLOCK_V, NAIVE_BLOCK_K, NAIVE_BLOCK = 32, 128, 1024


MIN_BLOCK_T, MAX_BLOCK_T = 16, 64
"""Rows of x that a tile of `tiled` has, at least and at most."""
MAX_FOUND, MANY_FOUND = 32768, 16384
"""Tokens that the merge of a row holds in registers: at most; without spills."""

SPACE = {
    "block_v": (64, 128, 256),
    "block_k": (64, 128),
    "warps": (4, 8),
    "stages": (3, 4, 6),
}
"""block_v x block_k : the tile of w that is loaded at a time"""
WIDE_SPACE = {
    "block_t": (128, 256),
    "block_v": (128, 256),
    "block_k": (64, 128),
    "warps": (8,),
    "stages": (3, 4),
}
"""block_t : rows of x in a tile; the others as in :data:`SPACE`"""
MAX_SUMS = 128
"""Sums of a thread: more do not fit into its registers."""
TENSOR_SHARE = 0.6
"""Part of the tensor cores' rate that tiles of 128 x 256 reach."""

ROUND_US = 0.4
"""Finding the first token of a tile, which overlaps with the loads of other programs by half."""


def _pointers(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    types = {tensor.name: tensor.dtype_of(problem) for tensor in ENTRY.tensors}
    types |= {"scores": "float32", "tile_values": "float32", "tile_ids": "int32"}
    return {name: triton.pointer(name, types[name]) for name in names}


def _sizes(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    return {name: triton.integer(problem[name]) for name in names}


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, vocab = problem["tokens"], problem["vocab"]
    if not tokens:
        return Program(())
    score = triton.step(
        f"{DEVICE}:score",
        (ceil(vocab / NAIVE_BLOCK_V), tokens, 1),
        _pointers(problem, "x", "w", "scores", "logits") | _sizes(problem, "vocab", "hidden"),
        {
            "HAS_LOGITS": problem["has_logits"],
            "BLOCK_V": NAIVE_BLOCK_V,
            "BLOCK_K": NAIVE_BLOCK_K,
        },
        num_warps=4,
    )
    take = triton.step(
        f"{DEVICE}:take_first",
        (tokens, 1, 1),
        _pointers(problem, "scores", "values", "ids") | _sizes(problem, "vocab"),
        {"TOP_K": problem["top_k"], "BLOCK": NAIVE_BLOCK},
        num_warps=4,
    )
    return Program((score, take), {"scores": 4 * tokens * vocab})


def _block_t(problem: Problem, config: Config) -> int:
    """Rows of x in a tile."""
    if "block_t" in config:
        return int(config["block_t"])
    return min(max(next_power_of_two(problem["tokens"]), MIN_BLOCK_T), MAX_BLOCK_T)


def _num_tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["vocab"] / config["block_v"])


def _num_found(problem: Problem, config: Config) -> int:
    """Tokens of a row that all tiles together find."""
    return _num_tiles(problem, config) * int(problem["top_k"])


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, found, block_t = (
        problem["tokens"],
        _num_found(problem, config),
        _block_t(problem, config),
    )
    if not tokens:
        return Program(())
    score = triton.step(
        f"{DEVICE}:score_tile",
        (_num_tiles(problem, config), ceil(tokens / block_t), 1),
        _pointers(problem, "x", "w", "tile_values", "tile_ids", "logits")
        | {"tokens": triton.integer(tokens, divisor=1)}
        | _sizes(problem, "vocab", "hidden"),
        {
            "TOP_K": problem["top_k"],
            "HAS_LOGITS": problem["has_logits"],
            "BLOCK_V": config["block_v"],
            "BLOCK_T": block_t,
            "BLOCK_K": config["block_k"],
        },
        num_warps=config["warps"],
        num_stages=config["stages"],
    )
    block = max(next_power_of_two(found), 128)
    merge = triton.step(
        f"{DEVICE}:merge",
        (tokens, 1, 1),
        _pointers(problem, "tile_values", "tile_ids", "values", "ids")
        | {"count": triton.integer(found, divisor=1)},
        {"TOP_K": problem["top_k"], "BLOCK": block},
        num_warps=min(max(block // 256, 4), 32),
    )
    num_bytes = 4 * tokens * found
    return Program((score, merge), {"tile_values": num_bytes, "tile_ids": num_bytes})


def _stage_bytes(problem: Problem, config: Config) -> int:
    return 2 * int(config["block_v"] + _block_t(problem, config)) * int(config["block_k"])


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["tokens"] > MAX_GRID_Y:
        return f"tokens={problem['tokens']} are more than {MAX_GRID_Y}, the second axis of a grid"
    return None


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_bytes = _stage_bytes(problem, config) * config["stages"]
    if num_bytes > gpu.shared_bytes:
        return f"{config['stages']} stages take {num_bytes} of {gpu.shared_bytes} bytes"
    found = _num_found(problem, config)
    if found > MAX_FOUND:
        return f"tiles find {found} tokens a row, and the merge holds {MAX_FOUND}"
    if (sums := _sums(problem, config)) > MAX_SUMS:
        return f"{sums} sums a thread do not fit into its registers"
    return _illegal_naive(config, problem, gpu)


def _sums(problem: Problem, config: Config) -> int:
    """Sums of a thread."""
    return int(config["block_v"]) * _block_t(problem, config) // (32 * int(config["warps"]))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    found = _num_found(problem, config)
    if found > MANY_FOUND:
        return f"tiles find {found} tokens a row, and registers hold {MANY_FOUND}"
    sums = _sums(problem, config)
    if sums > 64:
        return f"{sums} sums a thread are searched slowly"
    if config["block_v"] < 16 * config["warps"]:
        return f"{config['block_v']} rows of w are few for {config['warps']} warps"
    return None


def _unpromising_wide(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["tokens"] <= MAX_BLOCK_T:
        return f"{problem['tokens']} rows of x fit into a smaller tile"
    if problem["tokens"] <= config["block_t"] // 2:
        return f"{problem['tokens']} rows of x fill at most half of a tile"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time of the memory or of the tensor cores; then searches and the merge.

    The memory takes longer where few bytes are in flight, and reads w for each group of rows of x.
    """
    groups = ceil(problem["tokens"] / _block_t(problem, config))
    blocks = gpu.shared_bytes // (_stage_bytes(problem, config) * config["stages"])
    in_flight = max(blocks, 1) * 2 * config["block_v"] * config["block_k"] * (config["stages"] - 1)
    efficiency = 0.92 * min(1.0, in_flight / 65536) * (0.98 if config["block_k"] == 64 else 1.0)
    waves = ceil(_num_tiles(problem, config) / gpu.sms)
    search_us = 0.5 * waves * problem["top_k"] * ROUND_US * config["block_v"] / 128
    merge_us = LAUNCH_US + problem["top_k"] * ROUND_US
    w_bytes = 2 * problem["vocab"] * problem["hidden"] * (groups - 1)
    memory_us = copy_us(int(ENTRY.bytes_moved(problem) + w_bytes), gpu, efficiency)
    operations = 2 * groups * _block_t(problem, config) * problem["vocab"] * problem["hidden"]
    rate = TENSOR_SHARE * min(1.0, _sums(problem, config) / MAX_SUMS + 0.25)
    tensor_us = operations / (gpu.flops["bfloat16"] * rate) * 1e6
    return max(memory_us, tensor_us) + groups * search_us + merge_us


IMPLEMENTATIONS = (
    Implementation(
        entry="lm_head",
        language="triton",
        variant="naive",
        summary="all logits, then a search for one token after the other",
        archs=("sm_80+",),
        space={},
        illegal=_illegal_naive,
        program=_naive,
        estimate=lambda problem, config, gpu: (
            4 * copy_us(ENTRY.bytes_moved(problem), gpu) * max(problem["tokens"], 1)
        ),
        rank=0,
    ),
    Implementation(
        entry="lm_head",
        language="triton",
        variant="tiled",
        summary="tensor cores; the first tokens of each tile of w, merged by a second kernel",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        program=_tiled,
        estimate=_estimate,
        techniques={"asynchronous copies": "LDGSTS"},
        rank=1,
    ),
    Implementation(
        entry="lm_head",
        language="triton",
        variant="wide",
        summary="tensor cores; tiles of 128 or 256 rows of x, so w is read once for many tokens",
        archs=("sm_80+",),
        space=WIDE_SPACE,
        illegal=_illegal,
        unpromising=_unpromising_wide,
        program=_tiled,
        estimate=_estimate,
        techniques={"asynchronous copies": "LDGSTS"},
        rank=2,
        unverified="its receipt, of an H100, has 60 random problems and no named one",
    ),
)
