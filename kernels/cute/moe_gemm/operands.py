"""Kinds of the tensors of `moe_gemm`, in the order in which its kernels take them."""

from __future__ import annotations

from kernelcat.catalog.implementation import Pointer
from kernelcat.catalog.spec import Problem
from kernelcat.reference._experts import FP4, FP8

OPERANDS = tuple(map(Pointer, ("a", "a_scale", "w", "w_scale", "w_global_scale", "bias")))
GROUP_KINDS = ("*int32", "*int32")
"""Kinds of offsets and order."""


def element_kinds(problem: Problem) -> tuple[str, ...]:
    """Kinds of ``OPERANDS`` for a kernel that decodes one element at a time."""
    dtype, format, byte = f"*{problem['dtype']}", problem["format"], "*uint8"
    a = byte if problem["act_dtype"] == FP8 else dtype
    w = byte if format == "fp8" or format in FP4 else dtype
    scale = byte if format in FP4 else "*float32"
    return a, "*float32", w, scale, "*float32", dtype


def sum_kinds(problem: Problem) -> tuple[str, ...]:
    """Kinds of position, gates, residual and d."""
    dtype = f"*{problem['dtype']}"
    return "*int32", "*float32", dtype, dtype
