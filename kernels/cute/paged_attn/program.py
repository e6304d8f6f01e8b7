"""What the host sides of `paged_attn`'s kernels share: parameters, tiles, programs of tiles."""

from __future__ import annotations

from math import ceil

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
from kernelcat.reference.paged_attn import FP8, NVFP4, sm_scale
from kernelcat.runtime.gpu import Gpu

TENSORS = (
    "q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q", "sinks", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip


def compiled_in(problem: Problem) -> dict[str, int | str | bool]:
    """What is compiled in."""
    scales = "page" if problem["page_scales"] else "tensor"
    return {
        "dtype": problem["dtype"],
        "fp8": problem["kv_dtype"] == FP8,
        "head_dim": problem["head_dim"],
        "page_size": problem["page_size"],
        "window": problem["window"] > 0,
        "softcap": problem["softcap"] > 0,
        "sinks": problem["has_sinks"],
        "scales": scales if problem["has_scales"] else "none",
    }


def tensor_kinds(problem: Problem) -> tuple[str, ...]:
    """Of the tensors; float8 and NVFP4 as bytes."""
    dtype = "*" + problem["dtype"]
    cache = "*uint8" if problem["kv_dtype"] in (FP8, NVFP4) else dtype
    return (dtype, cache, cache, *["*int32"] * 3, *["*float32"] * 3, dtype, "*float32")


def parameters(problem: Problem, scratch: tuple[Param, ...], *numbers: int) -> tuple[Param, ...]:
    """Tensors, sizes, what a variant wants to know besides, and the numbers of the softmax."""
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
    return problem["batch"] == 0 or problem["tokens"] == 0


def why_not(problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] in (FP8, NVFP4) and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8"
    if max(problem["pages"], problem["table_width"] + 1) * problem["page_size"] >= 1 << 31:
        return "more slots than 32-bit indices reach"
    return None


WARPS = 4
"""Of a CTA, where the configuration does not say."""
BYTES_IN_FLIGHT = 40 << 10
"""Of an SM, that keep its share of the memory busy."""


def num_rows(problem: Problem) -> int:
    """Rows of one key-value head, of the longest sequence."""
    return int(problem["max_q"] * (problem["heads"] // problem["kv_heads"]))


def rows_a_tile(problem: Problem) -> int:
    """The fewest rows that hold all, up to the 64 of four warps."""
    return next((block for block in (16, 32) if num_rows(problem) <= block), 64)


def num_tiles(problem: Problem) -> int:
    """Tiles of rows."""
    row_tiles = ceil(num_rows(problem) / rows_a_tile(problem))
    return int(row_tiles * problem["kv_heads"] * problem["batch"])


def token_bytes(problem: Problem) -> int:
    """Of a cached key, or value."""
    return int(problem["head_dim"] * (1 if problem["kv_dtype"] == FP8 else 2))


def num_warps(config: Config) -> int:
    return int(config.get("warps", WARPS))


def cta_bytes(problem: Problem, config: Config) -> int:
    """Stages, or what the warps leave in their place, scales, parked queries; and 1 KB to spare."""
    stage = 2 * config["block_n"] * token_bytes(problem)
    left = 4 * (problem["head_dim"] + 8) * max(rows_a_tile(problem), 16 * num_warps(config))
    scales = 8 * config["block_n"] if problem["has_scales"] and problem["page_scales"] else 0
    is_fp8 = problem["kv_dtype"] == FP8
    parked = 32 * num_warps(config) * problem["head_dim"]
    parked *= problem["head_dim"] * (1 + is_fp8) >= 256
    return int(max(config["stages"] * stage, left) + config["stages"] * scales + parked + 1024)


def ctas_by_registers(problem: Problem) -> int:
    """What registers allow: sums and queries of a row are kept in them."""
    is_light = rows_a_tile(problem) == 16 and problem["kv_dtype"] != FP8
    return {64: 3 if is_light else 2, 128: 2, 256: 1}[problem["head_dim"]]


def size_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not(problem, gpu):
        return reason
    if problem["kv_dtype"] == NVFP4:
        return "NVFP4 is read by naive alone"
    most = max(problem["batch"] * config["splits"], problem["kv_heads"])
    if most > 65535 or num_rows(problem) * config["splits"] >= 1 << 31:
        return "more sequences, heads or rows than a grid has CTAs"
    slots, vectors = problem["pages"] * problem["page_size"], token_bytes(problem) // 16
    if slots * problem["kv_heads"] * vectors >= 1 << 31:
        return "a cache of 32 GB or more is beyond 32-bit offsets of 16 bytes"
    return None


def tile_reject(config: Config, problem: Problem) -> str | None:
    block_m, block_n, row_bytes = rows_a_tile(problem), config["block_n"], token_bytes(problem)
    warps_m = min(block_m // 16, num_warps(config))
    tokens = block_n * warps_m // num_warps(config)  # of a warp
    if tokens < 16:
        return f"block_n={block_n} leaves a warp fewer than 16 tokens"
    if block_n * row_bytes < 512 * num_warps(config):
        return f"block_n={block_n} leaves a thread nothing to copy"
    if tokens * problem["head_dim"] > (1 << 12 if problem["kv_dtype"] == FP8 else 1 << 13):
        return f"tiles of {block_m} x {block_n} do not fit the registers"
    if block_n * row_bytes > 1 << 15 or block_n * row_bytes * config["stages"] < 1 << 14:
        return "too much or too little of the cache to be under way"
    return None


def stages_reject(config: Config, shared_bytes: int, gpu: Gpu) -> str | None:
    if shared_bytes > gpu.shared_bytes:
        return f"{config['stages']} stages do not fit the shared memory"
    return None


def most_splits(problem: Problem, config: Config, most: int) -> int:
    """How many CTAs get a tile of tokens, ``most`` at most."""
    block_n, seen = config["block_n"], problem["table_width"] * problem["page_size"]
    if problem["window"]:
        seen = min(seen, problem["window"] + problem["max_q"] + block_n - 2)
    return int(min(most, seen // block_n))


def attend(
    problem: Problem, config: Config, gpu: Gpu, cluster: int, ctas_per_sm: int
) -> Program:
    """``splits`` CTAs to a tile, in clusters of ``cluster`` (1 or all of them)."""
    if is_empty(problem):
        return Program(())
    block_m, splits, tiles = rows_a_tile(problem), config["splits"], num_tiles(problem)
    constants = compiled_in(problem) | {
        "block_m": block_m,
        "row_halves": 1 if num_rows(problem) <= 8 else 2,
        "block_n": config["block_n"],
        "stages": config["stages"],
        "split": splits > cluster,
        "cluster": cluster,
        "warps": num_warps(config),
        "ctas_per_sm": ctas_per_sm,
        "programmatic": int(gpu.arch.strip("sm_af")) >= 90,
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
    """What ``ctas`` CTAs on each SM ask for of the bandwidth that there is."""
    stage = 2 * config["block_n"] * token_bytes(problem)
    under_way = stage * (config["stages"] - 1) * ctas
    # Small tiles wait at more barriers.
    haste = 1 - 256 / (256 + config["block_n"] * problem["head_dim"] // 2)
    return float(haste * min(1.0, (under_way / BYTES_IN_FLIGHT) ** 0.5))
