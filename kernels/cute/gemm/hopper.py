"""`gemm` on Hopper: which tiles, schedules, clusters and splits are tried, and what they run."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import ceil

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute.gemm.program import (
    fastest,
    persistent,
    source,
    span,
    why_not_tma,
)
from kernelcat.runtime.gpu import KB, Gpu

# wgmma: many rows -------------------------------------------------------------------------------

WGMMA_FROM = 65
"""Fewer rows leave a tile of 128 half empty."""
CLUSTERS = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2)}
WGMMA_SPACE = {
    "block_m": (128, 256),
    "block_n": (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 64),
    "pingpong": (False, True),
    "cluster": tuple(CLUSTERS),
}
SLOWER = 1.08
"""Candidates that the model finds slower than its best by this factor are not tried."""

BYTES_A_CYCLE = 256
FLOPS_A_CYCLE = 4096
STORED_A_CYCLE = 24
CLOCK_MHZ = 1600.0
UNHIDDEN = 0.1
"""Share of the shorter of arithmetic and memory that the longer does not hide."""


def _why_not_tile(config: Config, problem: Problem) -> str | None:
    """Registers hold 208 accumulators of a thread, fewer beside a residual that was asked ahead."""
    block_m, block_n = config["block_m"], config["block_n"]
    rows = block_m if config["pingpong"] else block_m // 2
    accumulators = rows * block_n // 128
    if accumulators > (176 if problem["residual"] else 208):
        return f"{accumulators} accumulators a thread leave too few registers for the rest"
    if config["pingpong"] and block_m > 128:
        return "a warpgroup's own tile has 128 rows"
    if not config["pingpong"] and accumulators < 96:
        return "two warpgroups on so small a tile wait for each other: pingpong does not"
    if block_n < 96 and problem["M"] > 128:
        return f"{block_n} columns re-read the operands too often for more than 128 rows"
    if block_n % (16 * span(problem)):
        return f"{block_n} columns of gates and what they gate are no whole parts of D"
    return None


def _clusters(problem: Problem, config: Config) -> int:
    """Tiles, counting those of a cluster as one."""
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    tiles_m = ceil(problem["M"] / (config["block_m"] * cluster_m))
    return tiles_m * ceil(problem["N"] / (config["block_n"] * cluster_n))


def _why_not_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not_tma(problem) or _why_not_tile(config, problem):
        return reason
    if problem["M"] < WGMMA_FROM:
        return f"tiles of {config['block_m']} rows are mostly empty at M={problem['M']}"
    return _why_not_cluster(config, problem, gpu)


def _why_not_cluster(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Few tiles leave the choice to a measurement; many are as large and shared as can be."""
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    block_m, block_n = config["block_m"], config["block_n"]
    alone_m, alone_n = problem["M"] <= block_m, problem["N"] <= block_n
    if (cluster_m > 1 and alone_m) or (cluster_n > 1 and alone_n):
        return "one tile has nothing to share in a cluster"
    waves = _clusters(problem, config) * cluster_m * cluster_n / gpu.sms
    if waves > 4 and cluster_m * cluster_n == 1:
        return "so many tiles share their operands in clusters"
    if waves > 12 and block_m * block_n < 128 * 160:
        return "so many tiles can be larger"
    if waves > 12 and not alone_m and (cluster_m > 1) == (block_m > block_n):
        return "so many tiles share the longer side"
    return None


def _wgmma_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := _why_not_wgmma(config, problem, gpu):
        return reason
    time, best = _wgmma_estimate(problem, config, gpu), _best_wgmma_us(problem, gpu)
    if time - LAUNCH_US > SLOWER * (best - LAUNCH_US):
        return f"its waves and re-reads take {time / best:.2f} times what other tiles' take"
    return None


@lru_cache(maxsize=64)
def _best_wgmma_us(problem: Problem, gpu: Gpu) -> float:
    names = list(WGMMA_SPACE)
    configs = (Config(dict(zip(names, v, strict=True))) for v in product(*WGMMA_SPACE.values()))
    legal = (c for c in configs if _why_not_wgmma(c, problem, gpu) is None)
    return min(_wgmma_estimate(problem, config, gpu) for config in legal)


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Cycles of the fullest SM: products, operands from L2, and what of the stores shows."""
    block_m, block_n = config["block_m"], config["block_n"]
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    waves = ceil(_clusters(problem, config) / (gpu.sms // (cluster_m * cluster_n)))
    k_tiles = ceil(problem["K"] / 64)
    math = 128 * block_m * block_n / FLOPS_A_CYCLE
    operands = 128 * (block_m / cluster_n + block_n / cluster_m) / BYTES_A_CYCLE
    store = 2 * block_m * block_n / span(problem) / STORED_A_CYCLE
    exposed = store * (1 if config["pingpong"] else waves)
    cycles = waves * k_tiles * (math + operands) + exposed
    m, n, k = problem["M"], problem["N"], problem["K"]
    memory_us = copy_us(2 * (m * k + n * k + m * n // span(problem)), gpu)
    shorter, longer = sorted((cycles / CLOCK_MHZ, memory_us))
    return LAUNCH_US + longer + UNHIDDEN * shorter


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    cluster = cluster_m * cluster_n
    kernel = source(
        "wgmma:Wgmma",
        problem,
        4,
        block_m=config["block_m"],
        block_n=config["block_n"],
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        pingpong=config["pingpong"],
    )
    num_ctas = min(_clusters(problem, config), gpu.sms // cluster) * cluster
    return persistent(kernel, problem, num_ctas, block=384, cluster=cluster)


WGMMA = Implementation(
    entry="gemm",
    language="cute",
    variant="wgmma",
    summary="persistent, cooperative or pingpong: TMA multicast ring, WGMMA, TMA store",
    archs=("sm_90a",),
    space=WGMMA_SPACE,
    illegal=_wgmma_reject,
    default=fastest(lambda: WGMMA),
    program=_wgmma_program,
    estimate=_wgmma_estimate,
    techniques={
        "tma": "UTMALDG",
        "tma store": "UTMASTG",
        "wgmma": "HGMMA",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
    },
    rank=3,
)

# skinny: few rows -------------------------------------------------------------------------------

SKINNY_UNTIL = 256
SKINNY_SPACE = {
    "block_m": (64, 128),
    "block_n": (8, 16, 32, 64, 128),
    "split_k": (1, 2, 3, 4, 6, 8),
    "ctas_per_sm": (2, 1),
}
SPLIT_US = 0.7
"""Meeting the other CTAs of a cluster, and reading what they summed."""


def _ring(config: Config, gpu: Gpu) -> tuple[int, int]:
    """Depth of a stage, and how many fit beside the sums, padding, barriers and alignment.

    256 bytes of a row at a time, unless four such stages are too many.
    """
    block_m, block_n = config["block_m"], config["block_n"]
    free = gpu.shared_bytes // config["ctas_per_sm"] - 4 * block_n * (block_m + 4) - 3 * KB
    fitting = {block_k: free // (2 * (block_m + block_n) * block_k) for block_k in (128, 64)}
    block_k = 128 if fitting[128] >= 4 else 64
    return block_k, min(12, fitting[block_k])


def _skinny_tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["N"] / config["block_m"]) * ceil(problem["M"] / config["block_n"])


def _skinny_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    m = problem["M"]
    if reason := why_not_tma(problem):
        return reason
    if m > SKINNY_UNTIL:
        return f"more than {SKINNY_UNTIL} rows are many"
    fitting = next((n for n in SKINNY_SPACE["block_n"] if n >= m), SKINNY_SPACE["block_n"][-1])
    if config["block_n"] != fitting:
        return f"block_n={config['block_n']} is not the smallest that holds {m} rows"
    block_k, stages = _ring(config, gpu)
    if stages < 3:
        return f"fewer than 3 stages fit {config['ctas_per_sm']} times in {gpu.shared_bytes} bytes"
    if config["split_k"] > 1 and ceil(problem["K"] / block_k) < 2 * config["split_k"]:
        return f"K={problem['K']} is too short for split_k={config['split_k']}"
    return _why_not_split(config, problem, gpu)


def _why_not_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tiles, split_k = _skinny_tiles(problem, config), config["split_k"]
    if config["block_m"] > 64 and tiles * 8 < gpu.sms:
        return f"{tiles} tiles of {config['block_m']} rows are too few"
    if config["ctas_per_sm"] == 2 and tiles * split_k <= gpu.sms:
        return "there is one CTA for an SM at most"
    if split_k > 1 and tiles * split_k > gpu.sms * config["ctas_per_sm"]:
        return f"{tiles} tiles fill the GPU without split_k={split_k}"
    return None


def _skinny_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The weights at the bandwidth that so many CTAs can draw, in waves where they do not fit."""
    m, n, k = problem["M"], problem["N"], problem["K"]
    ctas = _skinny_tiles(problem, config) * config["split_k"]
    slots = gpu.sms * config["ctas_per_sm"]
    drawn = min(1.0, min(ctas, slots) / gpu.sms) * (1.0 if ctas > gpu.sms else 0.95)
    again = 0.5 * (m > config["block_n"])  # the second column of tiles finds the weights in L2
    weights_us = 2 * n * k * (1 + again) / (gpu.bandwidth * BANDWIDTH_EFFICIENCY) * 1e6
    others_us = copy_us(2 * (m * k + m * n // span(problem)), gpu)
    split_us = SPLIT_US if config["split_k"] > 1 else 0.0
    return others_us + weights_us / max(drawn, 1e-3) + split_us


def _skinny_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    split_k, tiles = config["split_k"], _skinny_tiles(problem, config)
    block_k, stages = _ring(config, gpu)
    kernel = source(
        "skinny:Skinny",
        problem,
        4,
        block_m=config["block_m"],
        block_n=config["block_n"],
        block_k=block_k,
        split_k=split_k,
        stages=stages,
    )
    num_ctas = min(tiles, gpu.sms * config["ctas_per_sm"]) if split_k == 1 else tiles * split_k
    block = 2 * config["block_m"] + 32
    return persistent(kernel, problem, num_ctas, block=block, cluster=split_k)


SKINNY = Implementation(
    entry="gemm",
    language="cute",
    variant="skinny",
    summary="few rows: weights on WGMMA's wide side, K split in a cluster and summed there",
    archs=("sm_90a",),
    space=SKINNY_SPACE,
    illegal=_skinny_reject,
    default=fastest(lambda: SKINNY),
    program=_skinny_program,
    estimate=_skinny_estimate,
    techniques={"tma": "UTMALDG", "wgmma": "HGMMA", "mbarrier": "SYNCS"},
    rank=3,
)
