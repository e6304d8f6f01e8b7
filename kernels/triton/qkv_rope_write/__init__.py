"""`qkv_rope_write` in Triton: naive (one head of a token a program)."""

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import cache_write
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.reference.qkv_rope_write import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.qkv_rope_write.device:naive"
BLOCK_K = 64
"""Columns of x and of the weights that a program multiplies at a time."""


def _heads(problem: Problem) -> int:
    """Heads of a token's queries, keys and values."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    pointers = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    numbers = {
        "batch": problem["batch"], "heads": problem["heads"], "kv_heads": problem["kv_heads"],
        "width": problem["table_width"], "rotary_dim": problem["rotary_dim"],
        "hidden": problem["hidden"],
    }  # fmt: skip
    constants: dict[str, ConfigValue] = {
        "CHUNK": cache_write.chunk(problem["batch"]),
        "HEAD_DIM": problem["head_dim"],
        "PAGE_SIZE": problem["page_size"],
        "INTERLEAVED": problem["style"] == "interleaved",
        "HAS_SCALES": problem["has_scales"],
        "PAGE_SCALES": problem["page_scales"],
        "BIAS": problem["bias"],
        "BLOCK_K": BLOCK_K,
    }
    integers = {name: triton.integer(number, divisor=1) for name, number in numbers.items()}
    arguments = pointers | integers | {"eps": triton.real(problem["eps"])}
    grid = (problem["tokens"], _heads(problem), 1)
    return Program((triton.step(KERNEL, grid, arguments, constants, num_warps=4),))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _heads(problem) > MAX_GRID_Y:
        return (
            f"{_heads(problem)} heads of queries, keys and values are more than {MAX_GRID_Y}, "
            "the most programs on a second axis"
        )
    return illegal_float8(gpu) if problem["kv_dtype"] == FP8 else None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every token reads all weights again, twice: an element's partner is computed once more."""
    return LAUNCH_US + 6 * copy_us(problem["tokens"] * ENTRY.bytes_moved(problem), gpu)


NAIVE = Implementation(
    entry="qkv_rope_write",
    language="triton",
    variant="naive",
    summary="one head of a token a program; any shape",
    archs=("sm_80+",),
    space={},
    illegal=_illegal,
    program=_naive,
    estimate=_estimate,
    rank=0,
)

IMPLEMENTATIONS = (NAIVE,)
