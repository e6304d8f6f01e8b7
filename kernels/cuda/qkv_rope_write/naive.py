"""The baseline of `qkv_rope_write`, and the parameters of all its kernels."""

from __future__ import annotations

from dataclasses import replace

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Float32, Int32, Param, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.baseline import baseline
from kernelcat.kernels.cuda.common.cache_write import head_sizes, head_writer, num_heads
from kernelcat.kernels.cuda.common.launch import why_no_grid
from kernelcat.reference.qkv_rope_write import ENTRY
from kernelcat.runtime.gpu import Gpu

WARPS = 8
"""kNumWarps."""


def params(problem: Problem) -> tuple[Param, ...]:
    """The tensors, the sizes and eps: the parameters of every kernel of this entry."""
    tensors = (Pointer(tensor.name) for tensor in ENTRY.tensors)
    return (*tensors, *head_sizes(problem), Int32(problem["hidden"]), Float32(problem["eps"]))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    source = head_writer(problem, "naive")
    num_blocks = problem["tokens"] * num_heads(problem)
    shared_bytes = _shared_bytes(problem)
    return Program((Step(source, (num_blocks, 1, 1), params(problem), 32 * WARPS, shared_bytes),))


def _shared_bytes(problem: Problem) -> int:
    """A row of x, a head, and sums of warps, in float32."""
    return int(4 * (problem["hidden"] + problem["head_dim"] + WARPS))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _shared_bytes(problem) > gpu.shared_bytes:
        return f"a row of hidden={problem['hidden']} float32 does not fit in shared memory"
    return why_no_grid(problem["tokens"] * num_heads(problem))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every token reads all weights again, mostly from L2."""
    return LAUNCH_US + 4 * copy_us(problem["tokens"] * ENTRY.bytes_moved(problem), gpu)


IMPLEMENTATION = replace(
    baseline(
        "qkv_rope_write",
        "a thread block for each head of a token; any shape whose row of x fits in shared memory",
        _program,
        _estimate,
        {"fused multiply-add": "FFMA"},
    ),
    illegal=_illegal,
)
