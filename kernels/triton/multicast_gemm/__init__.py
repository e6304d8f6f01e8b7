"""`multicast_gemm` in Gluon: clusters of two blocks, one above the other, that multiply the same B.

What Triton makes of a cluster on sm_90a, by its machine code: 3.6 knows no TMA multicast, and each
block of a cluster loads all that it multiplies (``UTMALDG.2D``); Gluon of 3.9 makes
``UTMALDG.2D.MULTICAST`` of ``multicast=True``.
"""

from math import ceil

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.jit.cache import version_of
from kernelcat.kernels.triton.gemm.arguments import GROUP_M, Tile, sizes
from kernelcat.kernels.triton.gemm.gluon import (
    ACCUMULATORS,
    BARRIER_BYTES,
    CONSUMER_WARPS,
    CONSUMERS,
    MAX_STAGES,
    MIN_STAGES,
)
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.multicast_gemm.device:clustered"
BLOCKS = 2
HALF_OF_ROWS, ALL = ((1, 0),), ((0, 0),)  # what a block of a cluster has of a tile
MULTICAST_SINCE = (3, 9)


def num_stages(config: Config, gpu: Gpu) -> int:
    """As many as fit."""
    tile = Tile.of(config)
    left = gpu.shared_bytes - BARRIER_BYTES - 2 * tile.m * tile.n // config["subtiles"]
    return int(min(left // tile.stage_bytes, MAX_STAGES))


def _program(multicast: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    if m == 0 or n == 0:
        return Program(())
    tile, num_clusters = Tile.of(config), gpu.sms // BLOCKS
    part = BLOCKS * tile.m // CONSUMERS  # rows that a consumer of each block multiplies
    blocks = {
        "a": ((m, k), (part, tile.k), HALF_OF_ROWS),
        "b": ((n, k), (tile.n, tile.k), ALL),
        "d": ((m, n), (part, tile.n // config["subtiles"]), HALF_OF_ROWS),
    }
    arguments = {
        name: triton.descriptor(name, dtype, shape, block, gluon=True, cluster=cluster)
        for name, (shape, block, cluster) in blocks.items()
    }
    clusters = ceil(m / (BLOCKS * tile.m)) * ceil(n / tile.n)
    launch = triton.step(
        KERNEL,
        (min(num_clusters, clusters), 1, 1),
        arguments | sizes(problem, 1),
        {
            "CLUSTER_M": BLOCKS * tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP_M": GROUP_M // BLOCKS,
            "NUM_CLUSTERS": num_clusters,
            "NUM_STAGES": num_stages(config, gpu),
            "SUBTILES": config["subtiles"],
            "MULTICAST": multicast,
        },
        num_warps=CONSUMER_WARPS,
        num_ctas=BLOCKS,
    )
    return Program((launch,))


def _reject(multicast: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, n, k = Tile.of(config), problem["N"], problem["K"]
    version = version_of("triton") or ""
    if multicast and tuple(map(int, version.split(".")[:2])) < MULTICAST_SINCE:
        return f"Triton {version} has no TMA multicast, 3.9 has"
    if k == 0 or k % 8 or n % 8:
        return f"K={k} and N={n} must be multiples of 8: TMA rows are 16-byte aligned"
    if tile.m * tile.n // CONSUMERS > ACCUMULATORS:
        return f"{tile.m // CONSUMERS} x {tile.n} is no tile for one warpgroup"
    if num_stages(config, gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    return None


def _variant(variant: str, multicast: bool, **fields: object) -> Implementation:
    techniques = {"tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "HGMMA"}
    techniques |= {"tma multicast": "UTMALDG*MULTICAST"} if multicast else {}
    return implementation(
        entry="multicast_gemm",
        variant=variant,
        archs=("sm_90a",),
        space={"tile": ("128x128x64", "128x256x64", "256x128x64"), "subtiles": (2, 1)},
        illegal=lambda *asked: _reject(multicast, *asked),
        program=lambda *asked: _program(multicast, *asked),
        techniques=techniques | {"warp_specialization": "USETMAXREG"},
        gluon=True,
        **fields,
    )


IMPLEMENTATIONS = (
    _variant("unicast", False, summary="every block of a cluster loads its own operands by TMA"),
    _variant(
        "multicast",
        True,
        summary="the first block of a cluster loads B for both, by TMA multicast",
        rank=1,
        unverified="needs Triton 3.9, and has run nowhere yet",
    ),
)
