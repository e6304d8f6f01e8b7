"""A latent cache as arguments of Triton kernels, here and of `mla_kv_write`."""

from kernelcat.catalog.spec import Entry, Problem
from kernelcat.jit import triton
from kernelcat.reference.flashmla import PACKED_TYPE
from kernelcat.runtime.gpu import Gpu

PARTS = {"latent": "float8_e4m3fn", "factor": "float32", "rotated": "bfloat16"}
"""Pointers to the cache, and what they point to in rows of 656 bytes."""


def is_packed(problem: Problem) -> bool:
    """Whether the cache has rows of 656 bytes."""
    return bool(problem["kv_dtype"] == PACKED_TYPE)


def with_cache(entry: Entry, problem: Problem) -> dict[str, triton.Argument]:
    """Every tensor of the entry, in order, and for the cache a pointer to each type of elements."""
    arguments: dict[str, triton.Argument] = {}
    for tensor in entry.tensors:
        dtype = tensor.dtype_of(problem)
        if tensor.name == "kv_cache":
            for part, its_dtype in PARTS.items():
                own = its_dtype if is_packed(problem) else dtype
                arguments[part] = triton.pointer("kv_cache", own)
        else:
            arguments[tensor.name] = triton.pointer(tensor.name, dtype)
    return arguments


def reject_packed(problem: Problem, gpu: Gpu) -> str | None:
    if is_packed(problem) and int(gpu.arch[3:].rstrip("af")) < 89:
        return f"Triton converts no float8_e4m3fn on {gpu.arch}"
    return None
