"""`multicast_gemm` in CUDA C++: one kernel with three ways to load operands that clusters share."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Int32, Program, Step, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.persistent import sizes
from kernelcat.kernels.cuda.multicast_gemm import clusters
from kernelcat.kernels.cuda.multicast_gemm.clusters import BLOCK_K, DSMEM, MULTICAST, UNICAST
from kernelcat.runtime.gpu import KB, Gpu

THREADS = 384
"""Two consumer warpgroups and one with the producer."""

MAX_STAGES = 8
CHUNK = 64
"""Rows and columns of D that one TMA store writes from shared memory."""

FIXED_SHARED = 2 * 2 * CHUNK * CHUNK * 2 + KB + 256
"""Bytes of two chunks for each consumer warpgroup, the alignment, and the barriers (under 256)."""

REMOTE_ARRIVAL = {"arrival at a peer": "SYNCS.ARRIVE*RED"}


def num_stages(config: Config, gpu: Gpu) -> int:
    """As many as fit in shared memory, at most ``MAX_STAGES``."""
    return min((gpu.shared_bytes - FIXED_SHARED) // _stage_bytes(config), MAX_STAGES)


def _stage_bytes(config: Config) -> int:
    return 2 * BLOCK_K * sum(clusters.sizes(config["tile"]))


def _program(transfer: str, problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    if m == 0 or n == 0:
        return Program(())
    cluster_m, cluster_n = clusters.sizes(config["cluster"])
    slice_a, slice_b = clusters.slices(config, transfer)
    stages, size = num_stages(config, gpu), clusters.cluster_size(config)
    step = Step(
        instance(
            "multicast_gemm/cluster.cu",
            "multicast_gemm",
            *(dtype, *clusters.sizes(config["tile"]), cluster_m, cluster_n, stages),
            f"Transfer::k{transfer.capitalize()}",
        ),
        (clusters.num_clusters(problem, config, gpu) * size, 1, 1),
        (
            TensorMap("a", dtype, (k, m), (2 * k,), (BLOCK_K, slice_a), 128),
            TensorMap("b", dtype, (k, n), (2 * k,), (BLOCK_K, slice_b), 128),
            TensorMap("d", dtype, (n, m), (2 * n,), (CHUNK, CHUNK), 128),
            *sizes(problem),
            Int32(config["group_m"] // cluster_m),
        ),
        THREADS,
        stages * _stage_bytes(config) + FIXED_SHARED,
        (size, 1, 1),
    )
    return Program((step,))


IMPLEMENTATIONS = tuple(
    clusters.implementation(
        "cuda", transfer, summary, _program, techniques | {"cluster": "UCGABAR"}, group_m=(8, 16)
    )
    for transfer, summary, techniques in (
        (UNICAST, "every thread block loads its operands whole by TMA", {}),
        (
            DSMEM,
            "a thread block loads a slice of a shared operand, and copies the slice to its peers",
            {"copy between blocks": "UBLKCP.S.S", **REMOTE_ARRIVAL},
        ),
        (
            MULTICAST,
            "a thread block loads a slice of a shared operand by TMA, multicast to the cluster",
            {"tma multicast": "UTMALDG*MULTICAST", **REMOTE_ARRIVAL},
        ),
    )
)
