"""`attn_merge` in CUDA C++: one warp per row, or 16-byte loads of several parts at once."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Implementation,
    Int32,
    Int64,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.reference.attn_merge import ENTRY
from kernelcat.runtime.gpu import Gpu

MAX_GRID = 2**31 - 1
NAIVE_WARPS = 8
VECTOR = 8
"""Elements in 16 bytes."""

SPACE = {"threads": (128, 256, 512), "unroll": (1, 2, 4, 8), "eager": (False, True)}
"""``unroll`` is the number of parts that a thread has in flight. ``eager`` loads the result of a
part before its lse tells whether the part has keys: more bytes, but one wait less."""

RESIDENT_THREADS = 1024
"""Threads with 64 registers each that an SM holds at once."""
LOAD_US = 0.7
"""From a load to its value."""


def _num_rows(problem: Problem) -> int:
    return int(problem["tokens"] * problem["heads"])


def _launch(
    problem: Problem, variant: str, *constants: int | bool, blocks: int, threads: int
) -> Program:
    """One launch; ``constants`` are the template arguments after the element type and head_dim."""
    if blocks == 0:
        return Program(())
    values = (problem["head_dim"], *constants)
    arguments = ", ".join((f"kernelcat::{problem['dtype']}", *(str(v).lower() for v in values)))
    source = CudaSource(f"attn_merge/{variant}.cu", f"kernelcat::attn_merge_{variant}<{arguments}>")
    params = (
        *map(Pointer, ("outs", "lses", "out", "lse")),
        Int32(problem["parts"]),
        Int64(_num_rows(problem)),
    )
    return Program((Step(source, (blocks, 1, 1), params, threads),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(_num_rows(problem) / NAIVE_WARPS), MAX_GRID)
    return _launch(problem, "naive", blocks=blocks, threads=32 * NAIVE_WARPS)


def _num_threads(problem: Problem) -> int:
    return _num_rows(problem) * int(problem["head_dim"]) // VECTOR


def _num_blocks(problem: Problem, config: Config) -> int:
    return ceil(_num_threads(problem) / config["threads"])


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads = config["threads"]
    return _launch(
        problem,
        "vectorized",
        threads,
        config["unroll"],
        config["eager"],
        blocks=_num_blocks(problem, config),
        threads=threads,
    )


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    blocks = _num_blocks(problem, config)
    if blocks > MAX_GRID:
        return f"{blocks} thread blocks are more than a grid's {MAX_GRID}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["unroll"] > 1 and config["unroll"] >= 2 * problem["parts"]:
        return f"{config['unroll']} parts at a time are at least twice the {problem['parts']} parts"
    return None


def _waves(problem: Problem, gpu: Gpu) -> int:
    return ceil(_num_threads(problem) / (gpu.sms * RESIDENT_THREADS))


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time that the bandwidth allows or, with few rows, that of one load after another."""
    loads = ceil(problem["parts"] / config["unroll"]) * (1 if config["eager"] else 2)
    bytes_moved = ENTRY.bytes_moved(problem) * (1.0 if config["eager"] else 0.9)
    return max(copy_us(bytes_moved, gpu), LAUNCH_US + _waves(problem, gpu) * loads * LOAD_US)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """Eager where all threads run at once: waiting for loads then takes longer than the bytes."""
    unroll = max(u for u in SPACE["unroll"] if u == 1 or u < 2 * problem["parts"])
    return Config(threads=128, unroll=unroll, eager=_waves(problem, gpu) <= 1)


IMPLEMENTATIONS = (
    Implementation(
        entry="attn_merge",
        language="cuda",
        variant="naive",
        summary="one warp per row, one element at a time, one part after another",
        archs=("sm_80+",),
        space={},
        program=_naive,
        estimate=lambda problem, config, gpu: 4 * copy_us(ENTRY.bytes_moved(problem), gpu),
        techniques={"exponential by one instruction": "MUFU.EX2"},
        rank=0,
    ),
    Implementation(
        entry="attn_merge",
        language="cuda",
        variant="vectorized",
        summary="16-byte loads, several rows per thread block, several parts in flight",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        default=_default,
        program=_vectorized,
        estimate=_vectorized_us,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
