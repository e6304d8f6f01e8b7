"""`attn_merge` in CUDA C++: a warp a row, and 16-byte loads of several parts at once."""

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
"""``unroll`` is how many parts a thread has in flight. ``eager`` loads results before it is known
whether they count: more bytes, but one wait less."""

RESIDENT = 1024
"""Threads that an SM runs at once, of 64 registers."""
WAIT_US = 0.7
"""From a load to its value."""


def _num_rows(problem: Problem) -> int:
    return int(problem["tokens"] * problem["heads"])


def _launch(
    problem: Problem, variant: str, *constants: int | bool, blocks: int, threads: int
) -> Program:
    """``constants`` follow the element type and head_dim among template arguments."""
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


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_blocks(problem, config) > MAX_GRID:
        return f"the grid would have more than {MAX_GRID} blocks"
    if config["unroll"] > 1 and config["unroll"] >= 2 * problem["parts"]:
        return f"{config['unroll']} parts at a time are mostly none of {problem['parts']}"
    return None


def _waves(problem: Problem, gpu: Gpu) -> int:
    return ceil(_num_threads(problem) / (gpu.sms * RESIDENT))


def _vectorized_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    """What bandwidth allows, or where there are few rows, the waits for one load after another."""
    waits = ceil(problem["parts"] / config["unroll"]) * (1 if config["eager"] else 2)
    bytes_moved = ENTRY.bytes_moved(problem) * (1.0 if config["eager"] else 0.9)
    return max(copy_us(bytes_moved, gpu), LAUNCH_US + _waves(problem, gpu) * waits * WAIT_US)


def _default(problem: Problem, gpu: Gpu) -> Config:
    """Eager where all threads run at once: waits count there, and bytes do not."""
    unroll = max(u for u in SPACE["unroll"] if u == 1 or u < 2 * problem["parts"])
    return Config(threads=128, unroll=unroll, eager=_waves(problem, gpu) <= 1)


IMPLEMENTATIONS = (
    Implementation(
        entry="attn_merge",
        language="cuda",
        variant="naive",
        summary="a warp a row, one element at a time and one part after another",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(),
        program=_naive,
        estimate=lambda problem, config, gpu: 4 * copy_us(ENTRY.bytes_moved(problem), gpu),
        techniques={"exponential by one instruction": "MUFU.EX2"},
        rank=0,
    ),
    Implementation(
        entry="attn_merge",
        language="cuda",
        variant="vectorized",
        summary="16-byte loads, several rows a block and several parts in flight",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_reject,
        default=_default,
        program=_vectorized,
        estimate=_vectorized_us,
        techniques={"16-byte loads": "LDG*128", "16-byte stores": "STG*128"},
        rank=1,
    ),
)
