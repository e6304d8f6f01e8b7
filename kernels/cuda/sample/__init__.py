"""`sample` in CUDA C++: a thread block a row, or a cluster with the row in shared memory."""

from __future__ import annotations

from math import ceil

from kernelcat import dtypes
from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.launch import instance, why_no_grid
from kernelcat.reference.sample import ENTRY
from kernelcat.runtime.gpu import KB, Gpu

NAIVE_THREADS = 1024
EIGHT = 8
"""Tokens that a thread takes at a time."""
MAX_PORTABLE_CLUSTER = 8
"""Thread blocks of a cluster that every GPU with clusters can run."""
STATIC_BYTES = 4 * KB
"""Shared memory for reductions, at most."""

SPACE = {"cluster": (1, 2, 4, 8, 16), "threads": (256, 512, 1024)}
"""
cluster : thread blocks that share a row
threads : of a thread block
"""

CLUSTER_US = 0.8
"""What a reduction over a cluster takes more than one over a thread block."""
SM_BYTES = 75e9
"""Bytes that an SM can load in a second."""
PASS_TOKENS, DRAW_TOKENS = 50e9, 4e9
"""Tokens that an SM can compare in a second, and tokens that it can draw numbers for."""


PARAMS = tuple(Pointer(tensor.name) for tensor in ENTRY.tensors)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["rows"]:
        return Program(())
    source = instance("sample/naive.cu", "sample_naive", problem["dtype"])
    params = (*PARAMS, Int32(problem["vocab"]))
    return Program((Step(source, (problem["rows"], 1, 1), params, NAIVE_THREADS),))


def _stored_type(problem: Problem) -> str:
    """The element type of logits in shared memory: the penalty makes float32 of them."""
    return "float32" if problem["has_penalty"] else str(problem["dtype"])


def _shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of the largest part of a row."""
    num_eights = ceil(ceil(problem["vocab"] / EIGHT) / config["cluster"])
    return num_eights * EIGHT * dtypes.itemsize(_stored_type(problem))


def _num_blocks(problem: Problem, config: Config) -> int:
    return int(problem["rows"] * config["cluster"])


def _cluster(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["rows"]:
        return Program(())
    cluster, threads = config["cluster"], config["threads"]
    types = problem["dtype"], _stored_type(problem)
    source = instance("sample/cluster.cu", "sample_cluster", *types, threads, cluster)
    params = (*PARAMS, Int32(problem["vocab"]))
    step = Step(
        source,
        (_num_blocks(problem, config), 1, 1),
        params,
        threads,
        _shared_bytes(problem, config),
        (cluster, 1, 1),
        programmatic=True,
    )
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_bytes = _shared_bytes(problem, config) + STATIC_BYTES
    if num_bytes > gpu.shared_bytes:
        return f"{num_bytes} bytes of shared memory are more than {gpu.shared_bytes}"
    if config["cluster"] > MAX_PORTABLE_CLUSTER and gpu.arch.startswith("sm_12"):
        return f"{gpu.arch} has clusters of at most {MAX_PORTABLE_CLUSTER} thread blocks"
    return why_no_grid(_num_blocks(problem, config))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tokens = config["cluster"] * config["threads"] * EIGHT
    if tokens >= 4 * problem["vocab"]:
        return f"{config['cluster']} x {config['threads']} threads are too many for a row"
    return None


def _residents(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Thread blocks that an SM holds at once."""
    by_memory = gpu.shared_bytes // (_shared_bytes(problem, config) + STATIC_BYTES)
    return max(1, min(by_memory, 1536 // config["threads"]))


def _cluster_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of clusters; in each a part is loaded, and passes and reductions take turns."""
    residents = _residents(problem, config, gpu)
    waves = ceil(_num_blocks(problem, config) / (gpu.sms * residents))
    busy = max(1.0, min(residents, _num_blocks(problem, config) / gpu.sms))
    vocab = problem["vocab"] / config["cluster"]
    load_us = vocab * dtypes.itemsize(problem["dtype"]) * busy / SM_BYTES * 1e6
    num_passes = 1 + problem["has_temperature"] + 5 * problem["has_filters"]
    pass_us = vocab * busy / PASS_TOKENS * 1e6 + 0.2 * config["threads"] / 512
    pass_us += CLUSTER_US * (config["cluster"] > 1)
    draw_us = problem["has_temperature"] * vocab * busy / DRAW_TOKENS * 1e6
    busy_us = waves * (load_us + num_passes * pass_us + draw_us)
    return LAUNCH_US + max(copy_us(ENTRY.bytes_moved(problem), gpu) - LAUNCH_US, busy_us)


IMPLEMENTATIONS = (
    baseline(
        "sample",
        "one thread block a row, which reads the logits in every pass",
        _naive,
        lambda problem, config, gpu: 8 * copy_us(ENTRY.bytes_moved(problem), gpu) + 50,
        {"warp shuffle": "SHFL"},
    ),
    Implementation(
        entry="sample",
        language="cuda",
        variant="cluster",
        summary="a cluster a row: logits stay in shared memory, no sort, reductions by DSMEM",
        archs=("sm_90+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        program=_cluster,
        estimate=_cluster_us,
        techniques={
            "16-byte loads": "LDG*128",
            "warp shuffle": "SHFL",
            "clusters": "UCGABAR_ARV",
            "dependent launch": "ACQBULK",
        },
        rank=1,
    ),
)
