"""`paged_attn` in CuTe DSL: a warp for each query, and flash-decoding on tensor cores.

Few sequences are split between CTAs, that meet in device memory (``split``) or, from Hopper, are a
cluster and meet in shared memory (``cluster``).

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.gemm.program import fastest
from kernelcat.model import BANDWIDTH_EFFICIENCY, LAUNCH_US, WAVE_LATENCY_US, copy_us
from kernelcat.reference.paged_attn import ENTRY, sm_scale
from kernelcat.spec import Problem

FP8 = "float8_e4m3fn"
TENSORS = (
    "q", "k_cache", "v_cache", "block_table", "kv_lens", "cu_q", "sinks", "k_scale", "v_scale",
    "out", "lse",
)  # fmt: skip


def _constants(problem: Problem) -> dict[str, int | str | bool]:
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


def _kinds(problem: Problem) -> tuple[str, ...]:
    """Of the tensors; float8 as bytes."""
    dtype = "*" + problem["dtype"]
    cache = "*uint8" if problem["kv_dtype"] == FP8 else dtype
    return (dtype, cache, cache, *["*int32"] * 3, *["*float32"] * 3, dtype, "*float32")


def _params(problem: Problem, scratch: tuple[Param, ...], *numbers: int) -> tuple[Param, ...]:
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


def _is_empty(problem: Problem) -> bool:
    return problem["batch"] == 0 or problem["tokens"] == 0


def _why_not(problem: Problem, gpu: Gpu) -> str | None:
    if problem["kv_dtype"] == FP8 and FP8 not in gpu.flops:
        return f"{gpu.sku} has no float8"
    if max(problem["pages"], problem["table_width"] + 1) * problem["page_size"] >= 1 << 31:
        return "more slots than 32-bit indices reach"
    return None


# naive ------------------------------------------------------------------------------------------

NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    kinds = (*_kinds(problem), *["int32"] * 6, "float32", "float32")
    source = CuteSource("paged_attn.naive:Naive", kinds, tuple(_constants(problem).items()))
    grid = (problem["tokens"], ceil(problem["heads"] / NAIVE_WARPS), 1)
    return Program((Step(source, grid, _params(problem, ()), block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="paged_attn",
    language="cute",
    variant="naive",
    summary="one warp, one query of one head, key after key; any shape",
    archs=("sm_80+",),
    space={},
    reject=lambda config, problem, gpu: _why_not(problem, gpu),
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
    unverified="not yet run on a GPU",
)

# split ------------------------------------------------------------------------------------------

WARPS = 4
MMA_EFFICIENCY = 0.35
"""Of the tensor cores' peak, by mma.sync and ldmatrix on Hopper."""

SPLITS = (1, 2, 3, 4, 8, 16, 32, 64)

BYTES_IN_FLIGHT = 40 << 10
"""Of an SM, that keep its share of the memory busy."""


def _rows(problem: Problem) -> int:
    """Rows of one key-value head, of the longest sequence."""
    return int(problem["max_q"] * (problem["heads"] // problem["kv_heads"]))


def _block_m(problem: Problem) -> int:
    """The fewest rows that hold all, up to the 64 of four warps."""
    return next((block for block in (16, 32) if _rows(problem) <= block), 64)


def _tiles(problem: Problem) -> int:
    """Tiles of rows."""
    row_tiles = ceil(_rows(problem) / _block_m(problem))
    return int(row_tiles * problem["kv_heads"] * problem["batch"])


def _row_bytes(problem: Problem) -> int:
    """Of a cached key, or value."""
    return int(problem["head_dim"] * (1 if problem["kv_dtype"] == FP8 else 2))


def _warps(config: Config) -> int:
    return int(config.get("warps", WARPS))


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Stages, or what the warps leave in their place, scales, parked queries; and 1 KB to spare."""
    stage = 2 * config["block_n"] * _row_bytes(problem)
    left = 4 * (problem["head_dim"] + 8) * max(_block_m(problem), 16 * _warps(config))
    scales = 8 * config["block_n"] if problem["has_scales"] and problem["page_scales"] else 0
    is_fp8 = problem["kv_dtype"] == FP8
    parked = 32 * _warps(config) * problem["head_dim"]
    parked *= problem["head_dim"] * (1 + is_fp8) >= 256
    return int(max(config["stages"] * stage, left) + config["stages"] * scales + parked + 1024)


def _ctas_per_sm(problem: Problem) -> int:
    """What registers allow: sums and queries of a row are kept in them."""
    is_light = _block_m(problem) == 16 and problem["kv_dtype"] != FP8
    return {64: 3 if is_light else 2, 128: 2, 256: 1}[problem["head_dim"]]


def _slots(problem: Problem, config: Config, gpu: Gpu) -> int:
    """CTAs that run at once."""
    by_memory = gpu.shared_bytes // _shared_bytes(problem, config)
    return gpu.sms * max(1, min(by_memory, _ctas_per_sm(problem)))


def _split_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    is_least = config["stages"] == 2 and config["block_n"] * _row_bytes(problem) <= 1 << 14
    ctas = 1 if is_least else min(2, _ctas_per_sm(problem))
    return (
        _size_reject(config, problem, gpu)
        or _tile_reject(config, problem)
        or _stages_reject(config, ctas * _shared_bytes(problem, config), gpu)
        or _splits_reject(config, problem, gpu)
    )


def _size_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := _why_not(problem, gpu):
        return reason
    most = max(problem["batch"] * config["splits"], problem["kv_heads"])
    if most > 65535 or _rows(problem) * config["splits"] >= 1 << 31:
        return "more sequences, heads or rows than a grid has CTAs"
    slots, vectors = problem["pages"] * problem["page_size"], _row_bytes(problem) // 16
    if slots * problem["kv_heads"] * vectors >= 1 << 31:
        return "a cache of 32 GB or more is beyond 32-bit offsets of 16 bytes"
    return None


def _tile_reject(config: Config, problem: Problem) -> str | None:
    block_m, block_n, row_bytes = _block_m(problem), config["block_n"], _row_bytes(problem)
    warps_m = min(block_m // 16, _warps(config))
    tokens = block_n * warps_m // _warps(config)  # of a warp
    if tokens < 16:
        return f"block_n={block_n} leaves a warp fewer than 16 tokens"
    if block_n * row_bytes < 512 * _warps(config):
        return f"block_n={block_n} leaves a thread nothing to copy"
    if tokens * problem["head_dim"] > (1 << 12 if problem["kv_dtype"] == FP8 else 1 << 13):
        return f"tiles of {block_m} x {block_n} do not fit the registers"
    if block_n * row_bytes > 1 << 15 or block_n * row_bytes * config["stages"] < 1 << 14:
        return "too much or too little of the cache to be under way"
    return None


def _stages_reject(config: Config, shared_bytes: int, gpu: Gpu) -> str | None:
    if shared_bytes > gpu.shared_bytes:
        return f"{config['stages']} stages do not fit the shared memory"
    return None


def _most_splits(problem: Problem, config: Config, most: int) -> int:
    """How many CTAs get a tile of tokens, ``most`` at most."""
    return int(min(most, problem["table_width"] * problem["page_size"] // config["block_n"]))


def _splits_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    splits, tiles = config["splits"], _tiles(problem)
    most = _most_splits(problem, config, SPLITS[-1])
    if splits > max(most, 1):
        return f"{splits} CTAs share fewer tiles of tokens"
    if splits > 1 and tiles * splits > 8 * _slots(problem, config, gpu):
        return "the SMs are full with fewer splits"
    if 2 * splits <= most and 2 * tiles * splits <= gpu.sms:
        return "half of the SMs or more are idle"
    return None


def _split_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config, gpu, cluster=1, ctas_per_sm=_ctas_per_sm(problem))


def _program(
    problem: Problem, config: Config, gpu: Gpu, cluster: int, ctas_per_sm: int
) -> Program:
    if _is_empty(problem):
        return Program(())
    block_m, splits, tiles = _block_m(problem), config["splits"], _tiles(problem)
    constants = _constants(problem) | {
        "block_m": block_m,
        "block_n": config["block_n"],
        "stages": config["stages"],
        "split": splits > cluster,
        "cluster": cluster,
        "warps": _warps(config),
        "ctas_per_sm": ctas_per_sm,
        "programmatic": int(gpu.arch.strip("sm_af")) >= 90,
    }
    kinds = (*_kinds(problem), "*float32", "*int32", *["int32"] * 8, "float32", "float32")
    source = CuteSource("paged_attn.split:Split", kinds, tuple(constants.items()))
    row_tiles = tiles // (problem["kv_heads"] * problem["batch"])
    workspaces: dict[str, int] = {}
    scratch: tuple[Param, ...] = (Int64(0), Int64(0))
    if splits > cluster:
        row_bytes = 4 * (problem["head_dim"] + 4)
        partial = tiles * splits * block_m * row_bytes
        workspaces = {"partial": partial, "counters": 4 * tiles}
        scratch = tuple(Pointer(name) for name in workspaces)
    params = _params(problem, scratch, row_tiles, splits)
    grid = (row_tiles * cluster, problem["kv_heads"], problem["batch"] * (splits // cluster))
    step = Step(source, grid, params, block=32 * _warps(config), cluster=(cluster, 1, 1))
    return Program((step,), workspaces)


def _flow(problem: Problem, config: Config, ctas: float) -> float:
    """Share of the bandwidth that ``ctas`` CTAs on each SM ask for."""
    stage = 2 * config["block_n"] * _row_bytes(problem)
    under_way = stage * (config["stages"] - 1) * ctas
    # Small tiles wait at more barriers.
    haste = 1 - 256 / (256 + config["block_n"] * problem["head_dim"] // 2)
    return float(haste * min(1.0, (under_way / BYTES_IN_FLIGHT) ** 0.5))


def _split_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes or products, at the pace of the SMs that have work, and the merge of the splits."""
    if _is_empty(problem):
        return LAUNCH_US
    flops, moved = ENTRY.flops(problem), ENTRY.bytes_moved(problem)
    ctas, slots = _tiles(problem) * config["splits"], _slots(problem, config, gpu)
    waves = ceil(ctas / slots)
    # Full waves but for the last; few CTAs leave SMs idle.
    busy = ctas / (waves * slots) if waves > 1 else min(1.0, ctas / gpu.sms)
    flow = _flow(problem, config, min(slots, ctas) / gpu.sms)
    padding = _block_m(problem) * ceil(_rows(problem) / _block_m(problem)) / _rows(problem)
    math_us = flops * padding / (gpu.flops[problem["dtype"]] * MMA_EFFICIENCY) * 1e6
    merge_us = 0.0
    if config["splits"] > 1:
        partial = 8 * _tiles(problem) * config["splits"] * min(_rows(problem), _block_m(problem))
        merge_us = WAVE_LATENCY_US + partial * problem["head_dim"] / gpu.bandwidth * 1e6
    steady_us = max(copy_us(moved, gpu, BANDWIDTH_EFFICIENCY * flow), math_us)
    return steady_us / busy + waves * WAVE_LATENCY_US + merge_us


SPLIT: Implementation = Implementation(
    entry="paged_attn",
    language="cute",
    variant="split",
    summary="packed heads on mma.sync, pages by cp.async, keys split between warps and CTAs",
    archs=("sm_80+",),
    space={
        "block_n": (64, 128, 32, 16),
        "stages": (3, 4, 2),
        "splits": SPLITS,
    },
    reject=_split_reject,
    default=fastest(lambda: SPLIT),
    program=_split_program,
    estimate=_split_estimate,
    techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma": "HMMA.16816.F32"},
    rank=2,
    unverified="not yet run on a GPU",
)

# cluster ----------------------------------------------------------------------------------------

CLUSTERS = (16, 8, 4, 2)
GPC_SMS = 14
"""Of a graphics processing cluster that has few; a cluster of CTAs lies within one."""
SM_BANDWIDTH = 60e9
"""Bytes a second that reach one SM while others have nothing to read."""


def _inbox_bytes(problem: Problem) -> int:
    """For each vector of four floats, its place and that of maximum and sum."""
    return int(32 * _block_m(problem) * problem["head_dim"] // 4)


def _cluster_ctas_per_sm(problem: Problem, config: Config) -> int:
    """What registers allow."""
    return int(min(_ctas_per_sm(problem), 2 * WARPS // config["warps"]))


def _cluster_ctas(problem: Problem, config: Config, gpu: Gpu) -> int:
    """CTAs on an SM."""
    shared_bytes = _shared_bytes(problem, config) + _inbox_bytes(problem)
    return int(min(gpu.shared_bytes // shared_bytes, _cluster_ctas_per_sm(problem, config)))


def _cluster_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _is_empty(problem):
        return "nothing to share"
    shared_bytes = _shared_bytes(problem, config) + _inbox_bytes(problem)
    reason = (
        _size_reject(config, problem, gpu)
        or _tile_reject(config, problem)
        or _stages_reject(config, shared_bytes, gpu)
    )
    if reason:
        return reason
    splits, tiles = config["splits"], _tiles(problem)
    most = _most_splits(problem, config, CLUSTERS[0])
    if splits > most:
        return f"{splits} CTAs share fewer tiles of tokens"
    if splits > 8 and gpu.mig:
        return "a slice of a GPU may have no room for 16 CTAs side by side"
    if tiles * splits > gpu.sms * _cluster_ctas(problem, config, gpu):
        return "more clusters than run at once"
    if 2 * splits <= most and 4 * tiles * splits <= gpu.sms:
        return "three quarters of the SMs or more are idle"
    return None


def _cluster_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    ctas_per_sm = _cluster_ctas_per_sm(problem, config)
    return _program(problem, config, gpu, config["splits"], ctas_per_sm)


def _cluster_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes, at the pace of the SMs that have work."""
    splits, tiles = config["splits"], _tiles(problem)
    a_gpc = GPC_SMS * _cluster_ctas(problem, config, gpu) // splits
    at_once = max(1, gpu.sms // GPC_SMS * a_gpc)
    ctas = min(tiles, at_once) * splits
    flow = _flow(problem, config, ctas / gpu.sms)
    rate = min(gpu.bandwidth * BANDWIDTH_EFFICIENCY * flow, min(ctas, gpu.sms) * SM_BANDWIDTH)
    return LAUNCH_US + WAVE_LATENCY_US + ENTRY.bytes_moved(problem) / rate * 1e6


CLUSTER: Implementation = Implementation(
    entry="paged_attn",
    language="cute",
    variant="cluster",
    summary="split between the CTAs of a cluster, that merge through distributed shared memory",
    archs=("sm_90a", "sm_100a", "sm_103a"),
    space={
        "block_n": (128, 64, 32),
        "stages": (6, 4, 3),
        "splits": CLUSTERS,
        "warps": (WARPS, 2 * WARPS),
    },
    reject=_cluster_reject,
    default=fastest(lambda: CLUSTER),
    program=_cluster_program,
    estimate=_cluster_estimate,
    techniques={
        "cp.async": "LDGSTS",
        "mma": "HMMA.16816.F32",
        "cluster": "UCGABAR",
        "store at a peer": "STAS",
        "dependent launch": "ACQBULK",
    },
    rank=3,
    unverified="not yet run on a GPU",
)

IMPLEMENTATIONS = (NAIVE, SPLIT, CLUSTER)
