"""What the kernels of `moe_route` share in CUDA C++ and CuTe DSL: names of tensors, and sizes."""

from __future__ import annotations

from kernelcat.catalog.implementation import Int32, Param, Pointer
from kernelcat.catalog.spec import Problem

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
