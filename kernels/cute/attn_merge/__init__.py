"""`attn_merge` in CuTe DSL: one element at a time, or vectors of 16 bytes of several parts.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.reference.attn_merge import ENTRY
from kernelcat.runtime.gpu import Gpu

VECTOR = 8
"""Elements in 16 bytes."""

NAIVE_WARPS = 4


def _num_rows(problem: Problem) -> int:
    """Query tokens times heads."""
    return int(problem["tokens"] * problem["heads"])


def _illegal(problem: Problem, block_rows: int, unroll: int) -> str | None:
    """32-bit indices exceed the rows by less than ``block_rows``, the parts by 2 ``unroll``."""
    rows, parts = _num_rows(problem), problem["parts"]
    if max(rows + block_rows, parts + 2 * unroll) >= 1 << 31:
        return f"{rows} rows or {parts} parts are more than 32-bit indices reach"
    return None


def _program(
    problem: Problem, kernel: str, config: Config, block_rows: int, threads: int
) -> Program:
    """One launch, in thread blocks of ``block_rows`` rows."""
    num_rows = _num_rows(problem)
    if num_rows == 0:
        return Program(())
    element = "*" + problem["dtype"]
    kinds = (element, "*float32", element, "*float32", "int32", "int32")
    constants = (("dtype", problem["dtype"]), ("head_dim", problem["head_dim"]), *config.items())
    params = (
        *map(Pointer, ("outs", "lses", "out", "lse")),
        Int32(problem["parts"]),
        Int32(num_rows),
    )
    grid = (ceil(num_rows / block_rows), 1, 1)
    return Program((Step(CuteSource(kernel, kinds, constants), grid, params, block=threads),))


# naive ------------------------------------------------------------------------------------------


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, "attn_merge.naive:Naive", config, NAIVE_WARPS, 32 * NAIVE_WARPS)


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return copy_us(ENTRY.bytes_moved(problem), gpu, 0.3)


# vectorized -------------------------------------------------------------------------------------


def _block_rows(problem: Problem, config: Config) -> int:
    return int(config["threads"] * VECTOR // problem["head_dim"])


def _illegal_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return _illegal(problem, _block_rows(problem, config), config["unroll"])


def _unpromising_vectorized(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_rows, rows, unroll = _block_rows(problem, config), _num_rows(problem), config["unroll"]
    if unroll >= 2 * problem["parts"]:
        return f"{unroll} parts at a time are at least twice the {problem['parts']} parts"
    if config["threads"] > 128 and block_rows >= 2 * rows:
        return f"thread blocks of {block_rows} rows are at least half empty for {rows} rows"
    return None


def _vectorized_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    kernel = "attn_merge.vectorized:Vectorized"
    return _program(problem, kernel, config, _block_rows(problem, config), config["threads"])


def _vectorized_default(problem: Problem, gpu: Gpu) -> Config:
    """All parts at once if there are few; small thread blocks where large ones leave SMs idle."""
    vectors = _num_rows(problem) * problem["head_dim"] // VECTOR
    return Config(
        threads=256 if vectors >= 8 * 256 * gpu.sms else 128,
        unroll=next((unroll for unroll in (1, 2) if unroll >= problem["parts"]), 4),
    )


def _vectorized_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time; longer where a thread has few loads in flight, or SMs are not full."""
    efficiency = {1: 0.72, 2: 0.82, 4: 0.85}[config["unroll"]]
    ctas = max(1, ceil(_num_rows(problem) / _block_rows(problem, config)))
    busy = min(1.0, ctas * config["threads"] / (512 * gpu.sms))
    return copy_us(ENTRY.bytes_moved(problem), gpu, efficiency * busy)


IMPLEMENTATIONS = (
    Implementation(
        entry="attn_merge",
        language="cute",
        variant="naive",
        summary="one warp per row, one part after another, one element at a time; any shape",
        archs=("sm_80+",),
        space={},
        illegal=lambda config, problem, gpu: _illegal(problem, NAIVE_WARPS, 1),
        program=_naive_program,
        estimate=_naive_estimate,
        rank=0,
    ),
    Implementation(
        entry="attn_merge",
        language="cute",
        variant="vectorized",
        summary="16-byte loads of several parts at once, several rows per thread block",
        archs=("sm_80+",),
        space={"threads": (128, 256, 512), "unroll": (1, 2, 4)},
        illegal=_illegal_vectorized,
        unpromising=_unpromising_vectorized,
        default=_vectorized_default,
        program=_vectorized_program,
        estimate=_vectorized_estimate,
        techniques={"vector load": "LDG.E.128", "vector store": "STG.E.128"},
        rank=1,
    ),
)
