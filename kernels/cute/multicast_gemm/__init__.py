"""`multicast_gemm` in CuTe DSL: clusters of thread blocks, with and without TMA multicast."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cuda.multicast_gemm import clusters
from kernelcat.kernels.cuda.multicast_gemm.clusters import MULTICAST, UNICAST
from kernelcat.kernels.cute.common.matmul import is_empty, sizes
from kernelcat.runtime.gpu import Gpu

THREADS = 384
TENSORS = ("a", "b", "d")


def _program(transfer: str, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    dtype = problem["dtype"]
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
    params = (*map(Pointer, TENSORS), *sizes(problem), Int32(num_clusters))
    size = clusters.cluster_size(config)
    step = Step(source, (num_clusters * size, 1, 1), params, THREADS, cluster=(size, 1, 1))
    return Program((step,))


IMPLEMENTATIONS = (
    clusters.implementation(
        "cute", UNICAST, "every thread block loads its operands whole by TMA", _program, {}
    ),
    clusters.implementation(
        "cute",
        MULTICAST,
        "a thread block loads a slice of a shared operand by TMA, multicast to the cluster",
        _program,
        {
            "cluster": "UCGABAR",
            "tma multicast": "UTMALDG*MULTICAST",
            "arrival at a peer": "SYNCS.ARRIVE*RED",
        },
    ),
)
