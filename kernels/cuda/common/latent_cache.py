"""Template arguments of the kernels over caches of multi-head latent attention (MLA)."""

from __future__ import annotations

from kernelcat.catalog.spec import Problem
from kernelcat.reference.flashmla import PACKED_TYPE


def is_packed(problem: Problem) -> bool:
    """Whether rows have float8 latents with scales; otherwise all elements have 16 bits."""
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def cached_type(problem: Problem) -> str:
    """The type of a row's elements, or of a packed row."""
    return f"kernelcat::{'PackedRow' if is_packed(problem) else problem['kv_dtype']}"
