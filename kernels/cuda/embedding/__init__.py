"""`embedding` in CUDA C++: one thread an element, or several vectors of 16 bytes a thread."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline, element_by_element_us
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.launch import MAX_BLOCKS, instance, why_no_grid
from kernelcat.reference.embedding import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_THREADS = 256
VECTOR = 8
"""Elements in 16 bytes."""

SPACE = {"threads": (64, 128, 256, 512), "unroll": (1, 2, 4)}
"""unroll : vectors of 16 bytes that a thread has in flight"""


def _launch(
    problem: Problem,
    variant: str,
    *constants: int | bool,
    num_blocks: int,
    threads: int,
    programmatic: bool = False,
) -> Program:
    """One launch; ``constants`` follow the element types among the template arguments."""
    if num_blocks == 0:
        return Program(())
    types = (problem["dtype"], f"{problem['id_dtype']}_t")
    source = instance(f"embedding/{variant}.cu", f"embedding_{variant}", *types, *constants)
    params = (
        *map(Pointer, ("ids", "table", "out")),
        *map(Int64, (problem["tokens"], problem["vocab"])),
        Int32(problem["hidden"]),
        Float32(problem["scale"]),
    )
    step = Step(source, (num_blocks, 1, 1), params, threads, programmatic=programmatic)
    return Program((step,))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    num_blocks = ceil(problem["tokens"] * problem["hidden"] / NAIVE_THREADS)
    return _launch(problem, "naive", num_blocks=min(num_blocks, MAX_BLOCKS), threads=NAIVE_THREADS)


def _num_blocks(problem: Problem, config: Config) -> int:
    num_vectors = problem["tokens"] * problem["hidden"] // VECTOR
    return ceil(num_vectors / (config["threads"] * config["unroll"]))


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads, programmatic = config["threads"], has_dependent_launch(gpu)
    return _launch(
        problem,
        "vectorized",
        threads,
        config["unroll"],
        programmatic,
        num_blocks=_num_blocks(problem, config),
        threads=threads,
        programmatic=programmatic,
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["hidden"] % VECTOR:
        return f"hidden={problem['hidden']} must be a multiple of the {VECTOR} elements in 16 bytes"
    return why_no_grid(_num_blocks(problem, config))


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["unroll"] > 1 and _num_blocks(problem, config) < gpu.sms:
        return f"unroll={config['unroll']} leaves SMs without a thread block"
    return None


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bandwidth grows with the bytes that the resident threads of an SM have in flight."""
    resident = min(_num_blocks(problem, config) * config["threads"] / gpu.sms, 2048)
    in_flight = min(1.0, 0.3 + resident * config["unroll"] / 4096)
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * in_flight)


IMPLEMENTATIONS = (
    baseline(
        "embedding",
        "one thread an element; any shape",
        _naive,
        element_by_element_us(ENTRY.bytes_moved),
    ),
    Implementation(
        entry="embedding",
        language="cuda",
        variant="vectorized",
        summary="16-byte loads and stores, several vectors a thread; starts early by PDL",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        program=_vectorized,
        estimate=_vectorized_us,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
