"""`qkv_rope_write` in CUDA C++: naive (a thread block for each head of a token)."""

from __future__ import annotations

from dataclasses import replace

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Int32,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cuda import CudaSource
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.cache_write import rope_style
from kernelcat.kernels.cuda.common.launch import why_no_grid
from kernelcat.kernels.cuda.common.paged_cache import page_bits, scales
from kernelcat.reference.qkv_rope_write import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 8
"""kNumWarps."""
SIZES = ("tokens", "batch", "heads", "kv_heads", "table_width")


def _heads(problem: Problem) -> int:
    """Heads of a token's queries, keys and values."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    arguments = (
        *(f"kernelcat::{problem[name]}" for name in ("dtype", "kv_dtype")),
        str(problem["head_dim"]),
        rope_style(problem),
        scales(problem),
    )
    name = f"kernelcat::qkv_rope_write_naive<{', '.join(arguments)}>"
    params = (
        *(Pointer(tensor.name) for tensor in ENTRY.tensors),
        *(Int32(problem[size]) for size in SIZES),
        *map(Int32, (page_bits(problem), problem["rotary_dim"], problem["hidden"])),
        Float32(problem["eps"]),
    )
    source = CudaSource("qkv_rope_write/naive.cu", name)
    num_blocks = problem["tokens"] * _heads(problem)
    step = Step(source, (num_blocks, 1, 1), params, 32 * NAIVE_WARPS, _shared_bytes(problem))
    return Program((step,))


def _shared_bytes(problem: Problem) -> int:
    """A row of x, a head, and sums of warps, in float32."""
    return int(4 * (problem["hidden"] + problem["head_dim"] + NAIVE_WARPS))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _shared_bytes(problem) > gpu.shared_bytes:
        return f"a row of hidden={problem['hidden']} float32 does not fit in shared memory"
    return why_no_grid(problem["tokens"] * _heads(problem))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every token reads all weights again, mostly from L2."""
    return LAUNCH_US + 4 * copy_us(problem["tokens"] * ENTRY.bytes_moved(problem), gpu)


NAIVE = replace(
    baseline(
        "qkv_rope_write",
        "a thread block for each head of a token; any shape whose row of x fits in shared memory",
        _naive,
        _estimate,
        {"fused multiply-add": "FFMA"},
    ),
    illegal=_illegal,
)

IMPLEMENTATIONS = (NAIVE,)
