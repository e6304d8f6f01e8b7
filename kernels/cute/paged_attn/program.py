"""What the host sides of `paged_attn`'s kernels share: parameters, limits, programs of tiles."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from kernelcat.catalog.cost_model import row_share
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cute.common.paged_cache import illegal_slots, scales
from kernelcat.reference.paged_attn import FP8, NVFP4, most_visible, sm_scale
from kernelcat.runtime.gpu import Gpu

TENSORS = (
    "q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q", "sinks", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip


def kernel_constants(problem: Problem) -> dict[str, int | str | bool]:
    """Constants that every kernel is compiled with."""
    return {
        "dtype": problem["dtype"],
        "fp8": problem["kv_dtype"] == FP8,
        "head_dim": problem["head_dim"],
        "page_size": problem["page_size"],
        "window": problem["window"] > 0,
        "softcap": problem["softcap"] > 0,
        "sinks": problem["has_sinks"],
        "scales": scales(problem),
    }


def tensor_kinds(problem: Problem) -> tuple[str, ...]:
    """Kinds of the parameters in ``TENSORS``; caches of float8 and NVFP4 are bytes."""
    dtype = "*" + problem["dtype"]
    cache = "*uint8" if problem["kv_dtype"] in (FP8, NVFP4) else dtype
    return (dtype, cache, cache, *["*int32"] * 3, *["*float32"] * 3, dtype, "*float32")


def parameters(problem: Problem, scratch: tuple[Param, ...], *numbers: int) -> tuple[Param, ...]:
    """All parameters of a kernel; ``scratch`` and ``numbers`` are those of one variant only."""
    sizes = (problem[name] for name in ("batch", "tokens", "heads", "kv_heads", "table_width"))
    return (
        *map(Pointer, TENSORS),
        *scratch,
        *map(Int32, sizes),
        *map(Int32, numbers),
        Int32(problem["window"]),
        Float32(sm_scale(problem)),
        Float32(float(problem["softcap"])),
    )


def is_empty(problem: Problem) -> bool:
    """Whether there are no queries."""
    return problem["batch"] == 0 or problem["tokens"] == 0


def illegal_problem(problem: Problem, gpu: Gpu) -> str | None:
    """Why no kernel serves the problem."""
    if problem["kv_dtype"] in (FP8, NVFP4) and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8: kv_dtype must be the dtype of q"
    return illegal_slots(problem)


# Tiles on tensor cores --------------------------------------------------------------------------

WARPS = 4
"""Warps of a thread block, where the configuration has no ``warps``."""
BYTES_IN_FLIGHT = 40 << 10
"""Bytes that an SM must have in flight to get its part of the memory bandwidth."""
MAX_GRID = 65535
"""Thread blocks of a grid along y and z."""


def num_rows(problem: Problem) -> int:
    """Rows of one key-value head in the longest sequence: query tokens times heads."""
    axes = problem.values  # a choice asks for it a hundred times
    return int(axes["max_q"] * (axes["heads"] // axes["kv_heads"]))


@lru_cache(16)  # each configuration of a choice asks for the same problem
def tile_rows(problem: Problem) -> int:
    """Rows of a tile: the smallest of 16, 32 and 64 that holds all rows of a head, or 64."""
    return next((block for block in (16, 32) if num_rows(problem) <= block), 64)


def num_tiles(problem: Problem) -> int:
    """Tiles of rows, of all heads and sequences."""
    row_tiles = ceil(num_rows(problem) / tile_rows(problem))
    return int(row_tiles * problem["kv_heads"] * problem["batch"])


def token_bytes(problem: Problem) -> int:
    """Bytes of a cached key, or of a value."""
    axes = problem.values
    return int(axes["head_dim"] * (1 if axes["kv_dtype"] == FP8 else 2))


def num_warps(config: Config) -> int:
    """Warps of a thread block."""
    return int(config.get("warps", WARPS))


@lru_cache(16)  # each configuration of a choice asks up to four times
def cta_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a thread block, with 1 KB to spare.

    The ring of keys and values, or the warps' partial results, which overwrite the ring; then
    scales, and the queries where registers are too few for them.
    """
    block_n, stages, warps = config["block_n"], config["stages"], num_warps(config)
    stage, dim = 2 * block_n * token_bytes(problem), problem["head_dim"]
    partials = 4 * (dim + 8) * max(tile_rows(problem), 16 * warps)
    scale_bytes = 8 * block_n if scales(problem) == "page" else 0
    is_fp8 = problem["kv_dtype"] == FP8
    query = 32 * warps * dim * (dim * (1 + is_fp8) >= 256)
    return int(max(stages * stage, partials) + stages * scale_bytes + query + 1024)


def ctas_by_registers(problem: Problem) -> int:
    """Thread blocks on an SM that registers allow: they hold rows' queries and sums of values."""
    is_light = tile_rows(problem) == 16 and problem["kv_dtype"] != FP8
    return {64: 3 if is_light else 2, 128: 2, 256: 1}[problem["head_dim"]]


def max_splits(problem: Problem, config: Config, limit: int) -> int:
    """Splits of a tile of rows that all have a tile of tokens, up to ``limit``."""
    block_n, visible_keys = config["block_n"], problem["table_width"] * problem["page_size"]
    if problem["window"]:
        visible_keys = min(visible_keys, problem["window"] + problem["max_q"] + block_n - 2)
    return int(min(limit, visible_keys // block_n))


def warp_tokens(problem: Problem, config: Config) -> int:
    """Tokens of a tile that one warp attends to."""
    warps = num_warps(config)
    return int(config["block_n"] * min(tile_rows(problem) // 16, warps) // warps)


def illegal_tile(config: Config, problem: Problem, gpu: Gpu, shared_bytes: int) -> str | None:
    """Why a kernel cannot have tiles of this size; ``shared_bytes`` are those of a thread block."""
    block_n, warps = config["block_n"], num_warps(config)
    if reason := illegal_problem(problem, gpu) or _illegal_size(config, problem):
        return reason
    if (tokens := warp_tokens(problem, config)) < 16:
        return f"block_n={block_n} leaves a warp {tokens} tokens: mma.sync needs 16"
    if block_n * token_bytes(problem) < 512 * warps:
        return f"block_n={block_n} leaves some of {32 * warps} threads no 16 bytes to copy"
    if scales(problem) == "page" and block_n > 32 * warps:
        return f"block_n={block_n}: {32 * warps} threads load the scale of one token each"
    if shared_bytes > gpu.shared_bytes:
        return f"{shared_bytes} bytes of shared memory; {gpu.sku} has {gpu.shared_bytes}"
    return None


def _illegal_size(config: Config, problem: Problem) -> str | None:
    """Why the problem is too large, or its cache of a kind that only `naive` reads."""
    axes = problem.values
    if axes["kv_dtype"] == NVFP4:
        return "only the variant naive reads NVFP4"
    if max(axes["batch"] * config["splits"], axes["kv_heads"]) > MAX_GRID:
        return f"a grid has at most {MAX_GRID} thread blocks for sequences or for heads"
    if num_rows(problem) * config["splits"] >= 1 << 31:
        return f"{num_rows(problem)} rows are more than 32-bit indices reach"
    slots, vectors = axes["pages"] * axes["page_size"], token_bytes(problem) // 16
    if slots * axes["kv_heads"] * vectors >= 1 << 31:
        return "a cache of 32 GB or more is beyond 32-bit offsets of 16 bytes"
    return None


def unpromising_tile(config: Config, problem: Problem) -> str | None:
    """Why tiles of this size spill registers, or keep too few or too many bytes in flight."""
    block_n, stages = config["block_n"], config["stages"]
    max_elements = 1 << 12 if problem["kv_dtype"] == FP8 else 1 << 13
    if warp_tokens(problem, config) * problem["head_dim"] > max_elements:
        return f"tiles of {tile_rows(problem)} x {block_n} do not fit the registers"
    tile_bytes = block_n * token_bytes(problem)
    if tile_bytes > 1 << 15:
        return f"{tile_bytes} bytes of keys in a tile are more than the 32 KB that are enough"
    if tile_bytes * stages < 1 << 14:
        return f"{stages} stages hold fewer than 16 KB of keys, too few to have in flight"
    return None


def attend(
    problem: Problem, config: Config, gpu: Gpu, cluster: int, ctas_per_sm: int
) -> Program:
    """``splits`` thread blocks to a tile of rows, in clusters of ``cluster`` (1 or all of them)."""
    if is_empty(problem):
        return Program(())
    block_m, splits, tiles = tile_rows(problem), config["splits"], num_tiles(problem)
    constants = kernel_constants(problem) | {
        "block_m": block_m,
        "row_halves": 1 if num_rows(problem) <= 8 else 2,
        "block_n": config["block_n"],
        "stages": config["stages"],
        "split": splits > cluster,
        "cluster": cluster,
        "warps": num_warps(config),
        "ctas_per_sm": ctas_per_sm,
        "programmatic": has_dependent_launch(gpu),
    }
    kinds = (*tensor_kinds(problem), "*float32", "*int32", *["int32"] * 8, "float32", "float32")
    source = CuteSource("paged_attn.split:Split", kinds, tuple(constants.items()))
    row_tiles = tiles // (problem["kv_heads"] * problem["batch"])
    workspaces: dict[str, int] = {}
    scratch: tuple[Param, ...] = (Int64(0), Int64(0))
    if splits > cluster:
        row_bytes = 4 * (problem["head_dim"] + 4)
        partial = tiles * splits * block_m * row_bytes
        workspaces = {"partial": partial, "counters": 4 * tiles}
        scratch = tuple(Pointer(name) for name in workspaces)
    params = parameters(problem, scratch, row_tiles, splits)
    grid = (row_tiles * cluster, problem["kv_heads"], problem["batch"] * (splits // cluster))
    step = Step(source, grid, params, block=32 * num_warps(config), cluster=(cluster, 1, 1))
    return Program((step,), workspaces)


def bandwidth_share(problem: Problem, config: Config, ctas: float) -> float:
    """Part of the GPU's bandwidth that ``ctas`` thread blocks on each SM can use."""
    stage = 2 * config["block_n"] * token_bytes(problem)
    bytes_in_flight = stage * (config["stages"] - 1) * ctas
    # Thread blocks with small tiles wait at more barriers.
    tile_efficiency = 1 - 64 / (64 + config["block_n"] * problem["head_dim"] // 2)
    tile_efficiency *= row_share(token_bytes(problem))
    return float(tile_efficiency * min(1.0, (bytes_in_flight / BYTES_IN_FLIGHT) ** 0.5))


TILE_US = 0.155
"""Microseconds that a thread block waits at each tile of tokens: barriers and the block table."""
TILE_WORK_US = 0.215
"""Microseconds for products and softmax of 16 rows, 64 tokens and 128 elements of a head."""
CAP_US = 0.35
"""Microseconds for the softcap of 16 rows and 64 tokens."""
STAGE_US = 0.38
"""Microseconds from the request of a stage until it is there."""
SHARED_SM = 1.6
"""How much longer a tile takes where thread blocks share an SM."""
SM_BANDWIDTH = 65e9
"""Bytes a second that one SM can load while the other SMs load nothing."""
NEXT_US, NEXT_SHARE = 2.0, 0.44
"""Microseconds between two thread blocks in one place of an SM, and the part of the tiles of later
thread blocks that those beside them do not hide."""
OVERLAP = 2.2
"""Order of the norm that adds up the tiles of one thread block, and the bytes or the products of
all. These numbers are fitted to 170 times of `split` and `cluster` on an H200."""
MMA_EFFICIENCY = 0.28
"""Part of the tensor cores' peak that mma.sync with ldmatrix reaches on Hopper."""


def chain_us(
    problem: Problem, config: Config, waves: float, mean: float, end_us: float, *, alone: bool
) -> float:
    """The time of an SM's thread blocks one after another: of the longest sequence, then mean ones.

    ``mean`` is the number of tokens that a tile of rows sees on average, and ``end_us`` what a
    thread block does after its last tile. ``alone``: each thread block has an SM to itself.
    """
    block_n, splits, block_m = config["block_n"], config["splits"], tile_rows(problem)
    scores = block_n * block_m / (64 * 16)
    score_us = TILE_WORK_US * problem["head_dim"] / 128 + (CAP_US if problem["softcap"] else 0.0)
    copy_us = 2 * block_n * token_bytes(problem) / SM_BANDWIDTH * 1e6
    tile_us = max(TILE_US + score_us * scores, STAGE_US / (config["stages"] - 1))
    tile_us = max(tile_us * (1.0 if alone else SHARED_SM), copy_us)
    longest = ceil(most_visible(problem, block_m) / block_n)
    longest_us = ceil(longest / splits) * tile_us + end_us
    if waves <= 1:
        return longest_us
    mean_us = NEXT_SHARE * mean / (block_n * splits) * tile_us
    return longest_us + (waves - 1) * (NEXT_US + mean_us + end_us)


def math_us(problem: Problem, tokens: float, ctas: int, gpu: Gpu) -> float:
    """The time of the products of all tiles of rows, which see ``tokens``, on the busy SMs."""
    flops = 4 * tile_rows(problem) * problem["head_dim"] * tokens
    busy = min(1.0, ctas / gpu.sms)
    return float(flops / (gpu.flops[problem["dtype"]] * MMA_EFFICIENCY * busy) * 1e6)


def overlapped_us(*parts_us: float) -> float:
    """The time of what runs at once and hides each other, but not perfectly."""
    return float(sum(us**OVERLAP for us in parts_us) ** (1 / OVERLAP))
