"""`multicast_gemm` in CuTe DSL: clusters of CTAs, with and without TMA multicast."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Int32, Param, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.multicast_gemm import clusters
from kernelcat.kernels.cuda.multicast_gemm.clusters import MULTICAST, UNICAST
from kernelcat.runtime.gpu import Gpu

THREADS = 384
TENSORS = ("a", "b", "d")


def _program(transfer: str, problem: Problem, config: Config, gpu: Gpu) -> Program:
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    if m == 0 or n == 0:
        return Program(())
    block_m, block_n = clusters.sizes(config["tile"])
    cluster_m, cluster_n = clusters.sizes(config["cluster"])
    constants = {
        "dtype": dtype,
        "block_m": block_m,
        "block_n": block_n,
        "cluster_m": cluster_m,
        "cluster_n": cluster_n,
        "multicast": transfer == MULTICAST,
    }
    source = CuteSource(
        "multicast_gemm.cluster:Cluster",
        (f"*{dtype}",) * len(TENSORS) + ("int32",) * 4,
        tuple(constants.items()),
    )
    num_clusters = clusters.num_clusters(problem, config, gpu)
    params: tuple[Param, ...] = (*map(Pointer, TENSORS), *map(Int32, (m, n, k, num_clusters)))
    size = clusters.cluster_size(config)
    step = Step(source, (num_clusters * size, 1, 1), params, THREADS, cluster=(size, 1, 1))
    return Program((step,))


IMPLEMENTATIONS = (
    clusters.implementation(
        "cute", UNICAST, "every CTA of a cluster loads its own operands by TMA", _program, {}
    ),
    clusters.implementation(
        "cute",
        MULTICAST,
        "a CTA loads its slice of a shared operand by TMA, multicast to its peers",
        _program,
        {
            "cluster": "UCGABAR",
            "tma multicast": "UTMALDG*MULTICAST",
            "arrival at a peer": "SYNCS.ARRIVE*RED",
        },
    ),
)
