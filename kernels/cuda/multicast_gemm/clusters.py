"""What the variants of `multicast_gemm` share in all languages: tiles, clusters, the cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil

from kernelcat.catalog.cost_model import L2_TO_DRAM, LAUNCH_US, WAVE_LATENCY_US
from kernelcat.catalog.implementation import (
    CACHE_LINE,
    Config,
    ConfigValue,
    Implementation,
    Program,
)
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu

BLOCK_K = 64
"""Columns of A and B in a stage: 128 bytes, the widest row that the hardware swizzles."""

UNICAST, DSMEM, MULTICAST = VARIANTS = "unicast", "dsmem", "multicast"
"""How a shared operand reaches the thread blocks that need it, in the order of their ranks."""

TILES: tuple[ConfigValue, ...] = ("128x256", "256x128", "256x192", "128x192", "128x128")
"""Rows x columns of D that one thread block computes at a time."""

CLUSTERS: tuple[ConfigValue, ...] = ("2x1", "1x2", "2x2", "4x1")
"""Thread blocks along M x along N."""


def sizes(text: str) -> tuple[int, int]:
    """``"2x1"`` -> (2, 1)."""
    m, n = text.split("x")
    return int(m), int(n)


def cluster_size(config: Config) -> int:
    cluster_m, cluster_n = sizes(config["cluster"])
    return cluster_m * cluster_n


def cluster_tiles(problem: Problem, config: Config) -> int:
    """Cluster tiles that cover D, each the tiles of all thread blocks of a cluster."""
    (block_m, block_n), (cluster_m, cluster_n) = sizes(config["tile"]), sizes(config["cluster"])
    return ceil(problem["M"] / (block_m * cluster_m)) * ceil(problem["N"] / (block_n * cluster_n))


def num_clusters(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Clusters to launch: one for each cluster tile, but no more than can run at the same time.

    The thread blocks of a cluster run in one GPC, which has 16 or 18 SMs on Hopper: clusters of two
    fill each GPC, clusters of four leave the SMs beyond 16 idle. A cluster more than can run at the
    same time would start only after another cluster has computed all its tiles.
    """
    size = cluster_size(config)
    resident = (gpu.sms if size <= 2 else gpu.sms // 16 * 16) // size
    return min(cluster_tiles(problem, config), resident)


def slices(config: Config, transfer: str) -> tuple[int, int]:
    """Rows of A and rows of B that one thread block loads into a stage."""
    (block_m, block_n), (cluster_m, cluster_n) = sizes(config["tile"]), sizes(config["cluster"])
    if transfer == UNICAST:
        return block_m, block_n
    return block_m // cluster_n, block_n // cluster_m


WGMMA_EFFICIENCY = 0.95
"""Share of the tensor cores' peak that wgmmas reach whose operands are there in time."""
STRADDLING = 1.35
"""Reads from L2 for a byte where rows begin inside a cache line, so that boxes straddle lines."""


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    n, k = problem["N"], problem["K"]
    if k == 0 or k % 8 or n % 8:
        return (
            f"N={n} and K={k} must be multiples of 8, and K positive: TMA needs rows of a multiple "
            "of 16 bytes"
        )
    return None


def estimate(transfer: str, problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of cluster tiles, each as long as its products or its reads from L2 take.

    A tenth of the reads' time is added even where the products take longer: the reads cost power,
    and they wait for each other in a longer queue.
    """
    block_m, block_n = sizes(config["tile"])
    clusters = num_clusters(problem, config, gpu)
    if clusters == 0:
        return LAUNCH_US
    flops = 2 * block_m * block_n * problem["K"]
    read_bytes = 2 * sum(slices(config, transfer)) * problem["K"]
    read_bytes *= STRADDLING if 2 * problem["K"] % CACHE_LINE else 1
    math_us = flops / (gpu.flops[problem["dtype"]] * WGMMA_EFFICIENCY / gpu.sms) * 1e6
    l2_us = read_bytes / (gpu.bandwidth * L2_TO_DRAM / gpu.sms) * 1e6
    # wgmmas of larger tiles read less shared memory for the same products; copies between thread
    # blocks take bandwidth of shared memory, too.
    shared_factor = 1 + 8 / block_m + 8 / block_n + (0.1 if transfer == DSMEM else 0.0)
    waves = ceil(cluster_tiles(problem, config) / clusters)
    return waves * (max(math_us * shared_factor, l2_us) + l2_us / 10 + WAVE_LATENCY_US) + LAUNCH_US


def implementation(
    language: str,
    transfer: str,
    summary: str,
    program: Callable[[str, Problem, Config, Gpu], Program],
    techniques: Mapping[str, str],
    **tuned: tuple[ConfigValue, ...],
) -> Implementation:
    """The variant ``transfer`` in ``language``; ``tuned`` are further parameters of its space.

    Only `unicast` may have clusters of a single thread block: the other variants need a sharer.
    """
    single = ("1x1",) if transfer == UNICAST else ()
    return Implementation(
        entry="multicast_gemm",
        language=language,
        variant=transfer,
        summary=summary,
        archs=("sm_90a",),
        space={"tile": TILES, "cluster": single + CLUSTERS, **tuned},
        illegal=_illegal,
        program=partial(program, transfer),
        estimate=partial(estimate, transfer),
        techniques={
            "wgmma": "HGMMA",
            "tma": "UTMALDG",
            "mbarrier": "SYNCS",
            "register reallocation": "USETMAXREG",
            "stmatrix": "STSM",
            **techniques,
        },
        rank=VARIANTS.index(transfer),
    )
