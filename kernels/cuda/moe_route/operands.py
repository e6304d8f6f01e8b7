"""What the kernels of `moe_route` share in CUDA C++ and CuTe DSL: names of tensors, and sizes."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Int32, Param, Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.runtime.gpu import Gpu

SELECTED = ("expert_ids", "weights")
MAPS = ("counts", "offsets", "order", "position", "load")


def pointers(*names: str) -> tuple[Param, ...]:
    """Pointers to tensors."""
    return tuple(map(Pointer, names))


def sizes(problem: Problem) -> tuple[Param, ...]:
    """tokens, experts, top_k, group_size and top_groups."""
    counts = [problem[axis] for axis in ("tokens", "experts", "top_k")]
    group_size = problem["experts"] // problem["groups"]
    return tuple(map(Int32, (*counts, group_size, problem["top_groups"])))


def exceeds_indices(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    """Why indices of 32 bits do not reach all assignments."""
    num_assignments = problem["tokens"] * problem["top_k"]
    if num_assignments >= 1 << 31:
        return f"{num_assignments} assignments are more than 32-bit indices reach"
    return None
