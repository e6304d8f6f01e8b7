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

NAIVE_THREADS = 512
EIGHT = 8
"""Tokens that a thread takes at a time."""
MAX_PORTABLE_CLUSTER = 8
"""Thread blocks of a cluster that every GPU with clusters can run."""
STATIC_BYTES = 4 * KB
"""Shared memory for reductions, at most."""

SPACE = {"cluster": (1, 2, 4, 8, 16), "threads": (128, 256, 512)}
"""
cluster : thread blocks that share a row
threads : of a thread block
"""

RESIDENT_THREADS = 768
"""Threads with 80 registers each that an SM holds at once."""
REDUCTION_US, CLUSTER_US = 0.3, 0.7
"""A reduction over a thread block; what one over a cluster takes in addition."""
LATENCY_US, LOADED_BYTES = 0.9, 64
"""From a load to its value; bytes that a thread has in flight."""
SM_BYTES = 75e9
"""Bytes that an SM can load in a second."""
PASS_TOKENS, THREAD_TOKENS, DRAW_TOKENS = 40e9, 1.2e8, 4.5e9
"""Tokens in a second: that an SM compares, that one thread compares, that an SM draws for."""

PARAMS = tuple(Pointer(tensor.name) for tensor in ENTRY.tensors)


def _kind(problem: Problem) -> tuple[bool, bool]:
    """The template arguments ``kDraws, kFilters``."""
    return problem["has_temperature"], problem["has_filters"]


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["rows"]:
        return Program(())
    source = instance("sample/naive.cu", "sample_naive", problem["dtype"], *_kind(problem))
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
    constants = (*types, *_kind(problem), threads, cluster)
    source = instance("sample/cluster.cu", "sample_cluster", *constants)
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
    return max(1, min(by_memory, RESIDENT_THREADS // config["threads"]))


def _cluster_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of clusters; in each a part of the logits is loaded, then passes take turns."""
    residents, threads = _residents(problem, config, gpu), config["threads"]
    num_blocks = _num_blocks(problem, config)
    busy = max(1.0, min(residents, num_blocks / gpu.sms))
    tokens = problem["vocab"] / config["cluster"] * busy
    rate = min(SM_BYTES, busy * threads * LOADED_BYTES / LATENCY_US * 1e6)
    load_us = tokens * dtypes.itemsize(problem["dtype"]) / rate * 1e6
    num_passes = 1 + problem["has_temperature"] + 5 * problem["has_filters"]
    pass_us = tokens / min(PASS_TOKENS, busy * threads * THREAD_TOKENS) * 1e6
    pass_us += REDUCTION_US + CLUSTER_US * (config["cluster"] > 1)
    draw_us = problem["has_temperature"] * tokens / DRAW_TOKENS * 1e6
    waves = max(1.0, num_blocks / (gpu.sms * residents))
    busy_us = LAUNCH_US + waves * (LATENCY_US + load_us + num_passes * pass_us + draw_us)
    return max(copy_us(ENTRY.bytes_moved(problem), gpu), busy_us)


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
