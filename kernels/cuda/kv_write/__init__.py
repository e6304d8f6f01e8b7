"""`kv_write` in CUDA C++: one warp per head, or 16-byte vectors of several heads per warp."""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import copy_us
from kernelcat.catalog.implementation import Config, Implementation, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.cache_write import (
    RESIDENT_WARPS,
    head_sizes,
    head_writer,
    num_heads,
    write_us,
)
from kernelcat.reference.kv_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4
THREAD_ELEMENTS = 16
"""Elements of a row that a thread of `vectorized` takes: two vectors of 16 bytes."""

SPACE = {"threads": (128, 256, 512), "unroll": (1, 2, 4)}
"""``unroll`` is the number of rows that a thread has in flight."""


def _launch(problem: Problem, variant: str, *constants: int, blocks: int, threads: int) -> Program:
    if not problem["tokens"]:
        return Program(())
    params = (*(Pointer(tensor.name) for tensor in ENTRY.tensors), *head_sizes(problem))
    source = head_writer(problem, variant, *constants)
    return Program((Step(source, (blocks, 1, 1), params, threads),))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    blocks = min(ceil(problem["tokens"] * num_heads(problem) / NAIVE_WARPS), 2**31 - 1)
    return _launch(problem, "naive", blocks=blocks, threads=32 * NAIVE_WARPS)


def _warp_rows(problem: Problem) -> int:
    """Rows that the lanes of a warp hold at once."""
    return int(32 * THREAD_ELEMENTS // problem["head_dim"])


def _warps(problem: Problem, config: Config) -> int:
    token_warps = ceil(num_heads(problem) / (_warp_rows(problem) * config["unroll"]))
    return int(problem["tokens"] * token_warps)


def _vectorized(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads, unroll = config["threads"], config["unroll"]
    blocks = ceil(32 * _warps(problem, config) / threads)
    return _launch(problem, "vectorized", threads, unroll, blocks=blocks, threads=threads)


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rotary_dim = problem["rotary_dim"]
    if rotary_dim % THREAD_ELEMENTS:
        return f"half of rotary_dim={rotary_dim} must be a multiple of the 8 elements in 16 bytes"
    if _warps(problem, config) + config["threads"] // 32 >= 1 << 31:
        return f"{_warps(problem, config)} warps are more than 32-bit indices reach"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    warp_rows = _warp_rows(problem) * config["unroll"]
    num_rows = num_heads(problem)
    if config["unroll"] > 1 and warp_rows >= 2 * num_rows:
        return f"{warp_rows} rows per warp are at least twice the {num_rows} rows of a token"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return write_us(ENTRY.bytes_moved(problem), _warps(problem, config), config, gpu)


def _is_full(problem: Problem, config: Config, gpu: Gpu) -> bool:
    """Whether the warps fill every SM."""
    return _warps(problem, config) >= gpu.sms * RESIDENT_WARPS


def _default(problem: Problem, gpu: Gpu) -> Config:
    """As many rows per thread as leave every SM full of warps."""
    smallest, *larger = (Config(threads=128, unroll=unroll) for unroll in SPACE["unroll"])
    found = smallest
    for config in larger:
        is_legal = _illegal(config, problem, gpu) is None
        is_promising = is_legal and _unpromising(config, problem, gpu) is None
        if is_promising and _is_full(problem, config, gpu):
            found = config
    return found


IMPLEMENTATIONS = (
    Implementation(
        entry="kv_write",
        language="cuda",
        variant="naive",
        summary="one warp per head of a token, one element at a time; any shape",
        archs=("sm_80+",),
        space={},
        program=_naive,
        estimate=lambda problem, config, gpu: 4 * copy_us(ENTRY.bytes_moved(problem), gpu),
        techniques={"search by votes of a warp": "VOTE"},
        rank=0,
    ),
    Implementation(
        entry="kv_write",
        language="cuda",
        variant="vectorized",
        summary="16-byte loads and stores, whole pairs per thread, several heads per warp",
        archs=("sm_80+",),
        space=SPACE,
        illegal=_illegal,
        unpromising=_unpromising,
        default=_default,
        program=_vectorized,
        estimate=_estimate,
        techniques={
            "16-byte loads": "LDG*128",
            "16-byte stores": "STG*128",
            "search by votes of a warp": "VOTE",
        },
        rank=1,
    ),
)
