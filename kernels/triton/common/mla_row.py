"""The cache of multi-head latent attention (MLA) as arguments (device/mla_row.py)."""

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.reference.flashmla import PACKED_TYPE
from kernelcat.runtime.gpu import Gpu

POINTERS = {"latent": "float8_e4m3fn", "factor": "float32", "rotated": "bfloat16"}
"""Pointers to the cache, and the type that each has for packed rows of 656 bytes."""


def is_packed(problem: Problem) -> bool:
    """Whether the cache has packed rows of 656 bytes."""
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def arguments(entry: Entry, problem: Problem) -> dict[str, triton.Argument]:
    """Every tensor of ``entry`` in order, with the three pointers in place of the cache."""
    pointers: dict[str, triton.Argument] = {}
    for tensor in entry.tensors:
        dtype = tensor.dtype_of(problem)
        if tensor.name != "kv_cache":
            pointers[tensor.name] = triton.pointer(tensor.name, dtype)
            continue
        for name, packed_dtype in POINTERS.items():
            part_dtype = packed_dtype if is_packed(problem) else dtype
            pointers[name] = triton.pointer("kv_cache", part_dtype)
    return pointers


def illegal_cache(problem: Problem, gpu: Gpu) -> str | None:
    """Why kernels cannot read or write the cache."""
    return illegal_float8(gpu) if is_packed(problem) else None
