"""`gemm` on Hopper: tiles, schedules, clusters and splits of its WGMMA kernels, and their cost."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from kernelcat.catalog import ring_model
from kernelcat.catalog.cost_model import (
    LAUNCH_US,
    resident_clusters,
)
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.ring_model import Tiles
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cute.common.matmul import span
from kernelcat.kernels.cute.gemm.program import illegal_tma, persistent, source
from kernelcat.reference.gemm import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

# wgmma: many rows -------------------------------------------------------------------------------

WGMMA_MIN_M = 65
"""Fewer rows are left to `skinny`: they fill at most half of a tile of 128."""
CLUSTERS = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2)}
"""Thread blocks of a cluster along M and along N."""
TALL_ALONE = 1.15
"""Measured over modelled time of tiles with 256 rows that share no operand in a cluster: 1.02 to
1.28 in ten problems on an H100."""
MAX_SLOWDOWN = 1.13
"""A configuration is unpromising if its estimate is more than the least one times this factor."""


def _accumulators(config: Config) -> int:
    """Accumulators of a thread."""
    rows = config["block_m"] if config["pingpong"] else config["block_m"] // 2
    return int(rows * config["block_n"] // 128)


def _illegal_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := illegal_tma(problem):
        return reason
    if problem["M"] < WGMMA_MIN_M:
        return f"M={problem['M']} leaves tiles of 128 rows mostly empty: `skinny` is for few rows"
    if config["pingpong"] and config["block_m"] > 128:
        return f"block_m={config['block_m']}: a warpgroup with a tile of its own holds 128 rows"
    if _accumulators(config) > 208:
        return f"{_accumulators(config)} accumulators a thread: registers hold 208 at most"
    unit = 16 * span(problem)
    if config["block_n"] % unit:
        return f"block_n={config['block_n']} must be a multiple of {unit}: 16 columns of D"
    return None


def _num_cluster_tiles(problem: Problem, config: Config) -> int:
    """Tiles of whole clusters that cover the product."""
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    num_m = ceil(problem["M"] / (config["block_m"] * cluster_m))
    return num_m * ceil(problem["N"] / (config["block_n"] * cluster_n))


def _unpromising_tile(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_n, accumulators = config["block_n"], _accumulators(config)
    if problem["residual"] and accumulators > 176:
        return f"{accumulators} accumulators leave too few registers for a residual loaded ahead"
    if not config["pingpong"] and accumulators < 96:
        return "two warpgroups on so small a tile wait for each other; with pingpong they do not"
    if block_n < 96 and problem["M"] > 128:
        return f"block_n={block_n} loads the rows of A too often where M={problem['M']}"
    return _unpromising_cluster(config, problem, gpu)


def _unpromising_cluster(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Where tiles are few, only a measurement tells; many tiles are large and share operands."""
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    block_m, block_n = config["block_m"], config["block_n"]
    is_one_m, is_one_n = problem["M"] <= block_m, problem["N"] <= block_n
    if (cluster_m > 1 and is_one_m) or (cluster_n > 1 and is_one_n):
        return "the second thread block of a cluster has no tile"
    waves = _num_cluster_tiles(problem, config) * cluster_m * cluster_n / gpu.sms
    if waves > 4 and cluster_m * cluster_n == 1:
        return f"{waves:.1f} waves: clusters load less"
    if waves > 12 and block_m * block_n < 128 * 160:
        return f"{waves:.1f} waves: larger tiles load less"
    if waves > 12 and not is_one_m and (cluster_m > 1) == (block_m > block_n):
        return f"{waves:.1f} waves: clusters that share the longer side of a tile load less"
    return None


def _too_slow_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    time_us, best_us = _wgmma_estimate(problem, config, gpu), _best_wgmma_us(problem, gpu)
    if time_us - LAUNCH_US > MAX_SLOWDOWN * (best_us - LAUNCH_US):
        return f"the estimate is {time_us / best_us:.2f} times the least estimate"
    return None


@lru_cache(maxsize=64)
def _best_wgmma_us(problem: Problem, gpu: Gpu) -> float:
    """The least estimate of the tiles and clusters that are promising by themselves."""
    configs = WGMMA.legal(problem, gpu)
    promising = (c for c in configs if _unpromising_tile(c, problem, gpu) is None)
    return min(_wgmma_estimate(problem, config, gpu) for config in promising)


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The cost model of persistent kernels; pingpong hides all stores but the last."""
    cluster_m, cluster_n = CLUSTERS[config["cluster"]]
    cluster, tiles = cluster_m * cluster_n, _num_cluster_tiles(problem, config)
    waves = ceil(tiles / (gpu.sms // cluster))
    ring_tiles = Tiles(
        problem["M"], problem["N"], 2 * problem["K"], config["block_m"], config["block_n"],
        cluster_m, cluster_n, tiles * cluster, waves, 1 if config["pingpong"] else waves,
    )  # fmt: skip
    bytes_moved = ENTRY.bytes_moved(problem)
    is_tall_alone = config["block_m"] == 256 and cluster == 1
    return ring_model.BITS_16.gemm_us(
        ring_tiles, gpu, problem["dtype"], bytes_moved,
        slowdown=TALL_ALONE if is_tall_alone else 1.0,
    )  # fmt: skip


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
        is_pingpong=config["pingpong"],
    )
    num_ctas = min(_num_cluster_tiles(problem, config), gpu.sms // cluster) * cluster
    return persistent(kernel, problem, num_ctas, block=384, cluster=cluster)


WGMMA = Implementation(
    entry="gemm",
    language="cute",
    variant="wgmma",
    summary="persistent, cooperative or pingpong: TMA multicast ring, WGMMA, TMA store",
    archs=("sm_90a",),
    space={
        "block_m": (128, 256),
        "block_n": (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 64),
        "pingpong": (False, True),
        "cluster": tuple(CLUSTERS),
    },
    illegal=_illegal_wgmma,
    unpromising=_unpromising_tile,
    too_slow=_too_slow_wgmma,
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

SKINNY_MAX_M = 256
"""More rows are left to `wgmma`."""
SKINNY_BLOCK_N = (8, 16, 32, 64, 128)
MIN_STAGES, MAX_STAGES = 3, 12


def _ring(config: Config, gpu: Gpu) -> tuple[int, int]:
    """Columns of a stage, and how many stages fit beside the partial sums and the barriers.

    Stages have 128 columns, or 64 where fewer than four stages of 128 would fit.
    """
    block_m, block_n = config["block_m"], config["block_n"]
    free = gpu.shared_bytes // config["ctas_per_sm"] - 4 * block_n * (block_m + 4) - 3 * KB
    num_stages = {block_k: free // (2 * (block_m + block_n) * block_k) for block_k in (128, 64)}
    block_k = 128 if num_stages[128] >= 4 else 64
    return block_k, min(MAX_STAGES, num_stages[block_k])


def _skinny_tiles(problem: Problem, config: Config) -> int:
    return ceil(problem["N"] / config["block_m"]) * ceil(problem["M"] / config["block_n"])


def _illegal_skinny(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := illegal_tma(problem):
        return reason
    if problem["M"] > SKINNY_MAX_M:
        return f"M={problem['M']} is more than {SKINNY_MAX_M}: `wgmma` is for many rows"
    block_k, num_stages = _ring(config, gpu)
    if num_stages < MIN_STAGES:
        ctas = config["ctas_per_sm"]
        return f"{ctas} rings of {MIN_STAGES} stages do not fit into {gpu.shared_bytes} bytes"
    if ceil(problem["K"] / block_k) < config["split_k"]:
        return f"K={problem['K']} has no k-block for each of split_k={config['split_k']}"
    return None


def _unpromising_skinny(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    m = problem["M"]
    smallest = next((n for n in SKINNY_BLOCK_N if n >= m), SKINNY_BLOCK_N[-1])
    if config["block_n"] != smallest:
        return f"block_n={config['block_n']}: {smallest} is the smallest that holds M={m}"
    block_k, _ = _ring(config, gpu)
    if config["split_k"] > 1 and ceil(problem["K"] / block_k) < 2 * config["split_k"]:
        return f"K={problem['K']} is too short for split_k={config['split_k']}"
    return _unpromising_split(config, problem, gpu)


def _unpromising_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_tiles, split_k = _skinny_tiles(problem, config), config["split_k"]
    if config["block_m"] > 64 and num_tiles * 8 < gpu.sms:
        return f"{num_tiles} tiles of {config['block_m']} rows are too few for {gpu.sms} SMs"
    if config["ctas_per_sm"] == 2 and num_tiles * split_k <= gpu.sms:
        return f"{num_tiles * split_k} thread blocks are no more than SMs: none shares an SM"
    if split_k > 1 and num_tiles > _resident_clusters(config, gpu):
        return f"{num_tiles} clusters of {split_k} thread blocks are not resident all at once"
    return None


def _resident_clusters(config: Config, gpu: Gpu) -> int:
    return max(resident_clusters(gpu.sms * config["ctas_per_sm"], config["split_k"]), 1)


def _skinny_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Turns of clusters, whose thread blocks split k and add up their sums.

    A thread block without a split stays for several tiles.
    """
    split_k, num_tiles = config["split_k"], _skinny_tiles(problem, config)
    block_m, block_n = config["block_m"], config["block_n"]
    clusters = min(num_tiles, _resident_clusters(config, gpu))
    turns = ceil(num_tiles / max(clusters, 1)) * ceil(clusters * split_k / gpu.sms)
    tiles = Tiles(
        problem["N"], problem["M"], 2 * problem["K"], block_m, block_n, 1, 1,
        num_tiles * split_k, turns / split_k, turns / split_k,
    )  # fmt: skip
    sums_us = turns * ring_model.BITS_16.cluster_sums_us(split_k, block_m * block_n)
    return ring_model.BITS_16.gemm_us(
        tiles, gpu, problem["dtype"], ENTRY.bytes_moved(problem), splits_k=split_k > 1,
        extra_us=sums_us,
    )  # fmt: skip


def _skinny_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    split_k, num_tiles = config["split_k"], _skinny_tiles(problem, config)
    block_k, num_stages = _ring(config, gpu)
    kernel = source(
        "skinny:Skinny",
        problem,
        4,
        block_m=config["block_m"],
        block_n=config["block_n"],
        block_k=block_k,
        split_k=split_k,
        num_stages=num_stages,
    )
    resident = gpu.sms * config["ctas_per_sm"]
    num_ctas = min(num_tiles, resident) if split_k == 1 else num_tiles * split_k
    block = 2 * config["block_m"] + 32
    return persistent(kernel, problem, num_ctas, block=block, cluster=split_k)


SKINNY = Implementation(
    entry="gemm",
    language="cute",
    variant="skinny",
    summary="few rows: weights on WGMMA's side of 64 rows, K split in a cluster and summed there",
    archs=("sm_90a",),
    space={
        "block_m": (64, 128),
        "block_n": SKINNY_BLOCK_N,
        "split_k": (1, 2, 3, 4, 6, 8),
        "ctas_per_sm": (2, 1),
    },
    illegal=_illegal_skinny,
    unpromising=_unpromising_skinny,
    program=_skinny_program,
    estimate=_skinny_estimate,
    techniques={"tma": "UTMALDG", "wgmma": "HGMMA", "mbarrier": "SYNCS"},
    rank=3,
)
