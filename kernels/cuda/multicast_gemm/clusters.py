"""What every variant of `multicast_gemm` shares, in any language: tiles, clusters, their cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

from kernelcat.catalog.cost_model import L2_TO_DRAM, LAUNCH_US, TENSOR_EFFICIENCY, WAVE_LATENCY_US
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu

BLOCK_K = 64
"""Columns of A and B a stage: 128 bytes, the widest row the hardware swizzles."""

UNICAST, DSMEM, MULTICAST = VARIANTS = "unicast", "dsmem", "multicast"
"""How a shared operand reaches the blocks that need it, in order of rank."""

TILES: tuple[ConfigValue, ...] = ("128x256", "256x128", "256x192", "128x192", "128x128")
"""Rows x columns of D that one block makes."""

CLUSTERS: tuple[ConfigValue, ...] = ("2x1", "1x2", "2x2", "4x1")
"""Blocks along M x along N."""


def sizes(text: str) -> tuple[int, int]:
    """``"2x1"`` -> (2, 1)."""
    m, n = text.split("x")
    return int(m), int(n)


def cluster_size(config: Config) -> int:
    cluster_m, cluster_n = sizes(config["cluster"])
    return cluster_m * cluster_n


def cluster_tiles(problem: Problem, config: Config) -> int:
    """Tiles of whole clusters that cover D."""
    (block_m, block_n), (cluster_m, cluster_n) = sizes(config["tile"]), sizes(config["cluster"])
    return ceil(problem["M"] / (block_m * cluster_m)) * ceil(problem["N"] / (block_n * cluster_n))


def num_clusters(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Clusters to launch: one a cluster tile, and no more than run at the same time.

    The blocks of a cluster share a GPC, which has 16 or 18 SMs on Hopper: pairs always fill it,
    and fours leave what is beyond 16 idle. A cluster too many would begin when the others end.
    """
    size = cluster_size(config)
    resident = (gpu.sms if size <= 2 else gpu.sms // 16 * 16) // size
    return min(cluster_tiles(problem, config), resident)


def slices(config: Config, transfer: str) -> tuple[int, int]:
    """Rows of A and of B that one block loads for a stage."""
    (block_m, block_n), (cluster_m, cluster_n) = sizes(config["tile"]), sizes(config["cluster"])
    if transfer == UNICAST:
        return block_m, block_n
    return block_m // cluster_n, block_n // cluster_m


def reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    n, k = problem["N"], problem["K"]
    if k == 0 or k % 8 or n % 8:
        return f"TMA needs whole 16-byte units: N={n} and K={k} must be multiples of 8, K > 0"
    return None


def estimate(transfer: str, problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of cluster tiles: each takes its products' time, or that of its reads from L2.

    Reads that stay behind the products still cost: power, and the longer queue before them.
    """
    block_m, block_n = sizes(config["tile"])
    clusters = num_clusters(problem, config, gpu)
    if clusters == 0:
        return LAUNCH_US
    flops = 2 * block_m * block_n * problem["K"]
    read_bytes = 2 * sum(slices(config, transfer)) * problem["K"]
    math_us = flops / (gpu.flops[problem["dtype"]] * TENSOR_EFFICIENCY / gpu.sms) * 1e6
    l2_us = read_bytes / (gpu.bandwidth * L2_TO_DRAM / gpu.sms) * 1e6
    # Larger tiles read less shared memory a product; copies between blocks take of it, too.
    shared = 1 + 8 / block_m + 8 / block_n + (0.1 if transfer == DSMEM else 0.0)
    waves = ceil(cluster_tiles(problem, config) / clusters)
    return waves * (max(math_us * shared, l2_us) + l2_us / 10 + WAVE_LATENCY_US) + LAUNCH_US


def implementation(
    language: str,
    transfer: str,
    summary: str,
    program: Callable[[str, Problem, Config, Gpu], Program],
    techniques: dict[str, str],
    **tuned: tuple[ConfigValue, ...],
) -> Implementation:
    """The variant ``transfer`` of ``language``, with ``tuned`` beside tiles and clusters.

    Without sharing there need not be a cluster, so that `unicast` has the best of both.
    """
    alone = ("1x1",) if transfer == UNICAST else ()
    space = {"tile": TILES, "cluster": alone + CLUSTERS, **tuned}
    cost = partial(estimate, transfer)

    def default(problem: Problem, gpu: Gpu) -> Config:
        """The best by the model."""
        fallback = Config({name: values[0] for name, values in space.items()})
        configs = made.configs(problem, gpu)
        return min(configs, key=lambda config: cost(problem, config, gpu), default=fallback)

    made = Implementation(
        entry="multicast_gemm",
        language=language,
        variant=transfer,
        summary=summary,
        archs=("sm_90a",),
        space=space,
        illegal=reject,
        default=default,
        program=partial(program, transfer),
        estimate=cost,
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
    return made
