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
LATENCY_US = 0.9
"""From a load to its value."""
NUM_FILTER_PASSES = 5
"""Passes over the kept logits until top-k, top-p and min-p have their thresholds."""
LOADED, KEPT, DRAWN = (8e3, 14), (15e3, 30), (3.4e3, 3.3)
"""Tokens in a microsecond, of an SM and of one thread: loaded and compared, compared again in
shared memory, and drawn for (a Philox number and a logarithm each)."""
NAIVE_TOKENS, NAIVE_FILTER_PASSES = 8.4e3, 14
"""Tokens in a microsecond of an SM in a pass of the baseline; its passes for the filters."""

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


def _tokens_us(tokens: float, threads: float, rates: tuple[float, float]) -> float:
    """Microseconds of ``threads`` threads of an SM for ``tokens``; rates of the SM and a thread."""
    of_sm, of_thread = rates
    return tokens / min(of_sm, threads * of_thread)


def _cluster_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Waves of clusters; in each the logits are loaded once, then passes take turns."""
    residents, threads = _residents(problem, config, gpu), config["threads"]
    num_blocks = _num_blocks(problem, config)
    busy = max(1.0, min(residents, num_blocks / gpu.sms))  # thread blocks of an SM
    tokens, threads = problem["vocab"] / config["cluster"] * busy, threads * busy
    reduction_us = REDUCTION_US + CLUSTER_US * (config["cluster"] > 1)
    wave_us = LATENCY_US + reduction_us + _tokens_us(tokens, threads, LOADED)
    if problem["has_temperature"]:
        wave_us += reduction_us + _tokens_us(tokens, threads, DRAWN)
    if problem["has_filters"]:
        wave_us += NUM_FILTER_PASSES * (reduction_us + _tokens_us(tokens, threads, KEPT))
    waves = max(1.0, num_blocks / (gpu.sms * residents))
    return max(copy_us(ENTRY.bytes_moved(problem), gpu), LAUNCH_US + waves * wave_us)


def _naive_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Passes over the logits: one, four more to draw, and those of the filters."""
    passes = 1 + 4 * problem["has_temperature"] + NAIVE_FILTER_PASSES * problem["has_filters"]
    rows_of_sm = max(1.0, problem["rows"] / gpu.sms)
    row_us = passes * (problem["vocab"] / NAIVE_TOKENS + REDUCTION_US)
    return max(copy_us(ENTRY.bytes_moved(problem), gpu), LAUNCH_US + rows_of_sm * row_us)


IMPLEMENTATIONS = (
    baseline(
        "sample",
        "one thread block a row, which reads the logits in every pass",
        _naive,
        _naive_us,
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
