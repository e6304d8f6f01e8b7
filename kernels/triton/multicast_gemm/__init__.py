"""`multicast_gemm` in Gluon: clusters of two thread blocks, which multiply the same tile of B.

What Triton makes of a cluster on sm_90a, by its machine code: 3.6 knows no TMA multicast, and each
thread block of a cluster loads all that it multiplies (``UTMALDG.2D``); Gluon of 3.9 makes
``UTMALDG.2D.MULTICAST`` of ``multicast=True``.
"""

from functools import partial
from math import ceil
from typing import Any

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.jit.cache import version_of
from kernelcat.kernels.cuda.multicast_gemm import clusters
from kernelcat.kernels.triton.common import ring
from kernelcat.kernels.triton.common.architectures import HOPPER
from kernelcat.kernels.triton.common.product import (
    GROUP_M,
    WARPGROUP_ACCUMULATORS,
    Tile,
    is_empty,
    sizes,
)
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.multicast_gemm.device:clustered"
CLUSTER = 2
"""Thread blocks of a cluster, one below the other."""
HALF_OF_ROWS, ALL = ((1, 0),), ((0, 0),)
"""The part of a tile that each thread block of a cluster has, as Gluon's ``cga_layout``."""
MULTICAST_SINCE = (3, 9)
"""The first version of Triton that has TMA multicast."""


def _num_stages(config: Config, gpu: Gpu) -> int:
    """As many stages as fit beside the tiles through which D is stored."""
    tile = Tile.of(config)
    return ring.num_stages(tile.stage_bytes, 2 * tile.m * tile.n // config["subtiles"], gpu)


def _program(multicast: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    tile, num_clusters = Tile.of(config), gpu.sms // CLUSTER
    part_rows = CLUSTER * tile.m // ring.CONSUMERS  # of one consumer in both thread blocks
    blocks = {
        "a": ((m, k), (part_rows, tile.k), HALF_OF_ROWS),
        "b": ((n, k), (tile.n, tile.k), ALL),
        "d": ((m, n), (part_rows, tile.n // config["subtiles"]), HALF_OF_ROWS),
    }
    arguments = {
        name: triton.descriptor(name, dtype, shape, block, gluon=True, cluster=cluster)
        for name, (shape, block, cluster) in blocks.items()
    }
    cluster_tiles = ceil(m / (CLUSTER * tile.m)) * ceil(n / tile.n)
    launch = triton.step(
        KERNEL,
        (min(num_clusters, cluster_tiles), 1, 1),
        arguments | sizes(problem, 1),
        {
            "CLUSTER_M": CLUSTER * tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP_M": GROUP_M // CLUSTER,
            "NUM_CLUSTERS": num_clusters,
            "NUM_STAGES": _num_stages(config, gpu),
            "SUBTILES": config["subtiles"],
            "MULTICAST": multicast,
        },
        num_warps=ring.CONSUMER_WARPS,
        num_ctas=CLUSTER,
    )
    return Program((launch,))


def _illegal(multicast: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, n, k = Tile.of(config), problem["N"], problem["K"]
    version = version_of("triton") or ""
    if multicast and tuple(map(int, version.split(".")[:2])) < MULTICAST_SINCE:
        return f"Triton {version} has no TMA multicast, 3.9 has"
    if k == 0 or k % 8 or n % 8:
        return (
            f"K={k} must be a positive multiple of 8 and N={n} a multiple of 8: "
            "TMA needs rows of a multiple of 16 bytes"
        )
    if tile.m * tile.n // ring.CONSUMERS > WARPGROUP_ACCUMULATORS:
        return (
            f"{tile.m // ring.CONSUMERS} x {tile.n} accumulators are more than the "
            f"{WARPGROUP_ACCUMULATORS} that the registers of a warpgroup hold"
        )
    return ring.illegal_stages(_num_stages(config, gpu), gpu)


PROGRAM_FACTOR = 1.01
"""All warps of a program wait for a tile of D to be stored, where CUDA's overlap it."""


def _estimate(multicast: bool, problem: Problem, config: Config, gpu: Gpu) -> float:
    tile, transfer = Tile.of(config), clusters.MULTICAST if multicast else clusters.UNICAST
    same = Config(tile=f"{tile.m}x{tile.n}", cluster=f"{CLUSTER}x1")
    return PROGRAM_FACTOR * clusters.estimate(transfer, problem, same, gpu)


def _variant(variant: str, multicast: bool, **fields: Any) -> Implementation:
    techniques = {"tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "HGMMA"}
    techniques |= {"tma multicast": "UTMALDG*MULTICAST"} if multicast else {}
    return Implementation(
        entry="multicast_gemm",
        language="triton",
        variant=variant,
        archs=HOPPER,
        space={"tile": ("128x128x64", "128x256x64", "256x128x64"), "subtiles": (2, 1)},
        illegal=partial(_illegal, multicast),
        program=partial(_program, multicast),
        estimate=partial(_estimate, multicast),
        techniques=techniques | {"warp_specialization": "USETMAXREG"},
        gluon=True,
        **fields,
    )


IMPLEMENTATIONS = (
    _variant(
        "unicast", False, summary="every thread block of a cluster loads its own operands by TMA"
    ),
    _variant(
        "multicast",
        True,
        summary="the first thread block of a cluster loads B for both, by TMA multicast",
        rank=1,
        unverified="needs Triton 3.9, and has run nowhere yet",
    ),
)
