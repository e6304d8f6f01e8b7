"""`qkv_rope_write` in Triton: naive (one head of a token a program), tiled (tensor cores)."""

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import cache_write, split_k, streamed
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.dependent_launch import dependent_step
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.kernels.triton.common.product import illegal_stages
from kernelcat.reference.qkv_rope_write import ENTRY, FP8
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.qkv_rope_write.device:"
NAIVE_BLOCK_K = 64
"""Columns of x and of the weights that a program of `naive` multiplies at a time."""

MANY_TOKENS = 64
"""Tokens beyond which tiles read weights again."""
SPACE = {"block_k": (64, 128, 256), "split_k": (1, 2, 3, 4, 6, 8), "stages": (3, 4, 6)}
"""
block_k : columns of a head's weights that are loaded at a time
split_k : parts of the columns of x
"""

LOOKUP_US = 2.0
"""Time from a token's sequence to its slot and its angles: loads that depend on one another."""


def _heads(problem: Problem) -> int:
    """Heads of a token's queries, keys and values."""
    return int(problem["heads"] + 2 * problem["kv_heads"])


def _pointers(problem: Problem) -> dict[str, triton.Argument]:
    return {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }


def _sizes(problem: Problem) -> dict[str, triton.Argument]:
    numbers = {
        "batch": problem["batch"], "heads": problem["heads"], "kv_heads": problem["kv_heads"],
        "width": problem["table_width"], "rotary_dim": problem["rotary_dim"],
    }  # fmt: skip
    sizes = {name: triton.integer(number, divisor=1) for name, number in numbers.items()}
    return sizes | {"hidden": triton.integer(problem["hidden"])}


def _constants(problem: Problem, tokens: int) -> dict[str, ConfigValue]:
    """The constants of a kernel whose programs have ``tokens`` tokens each."""
    return {
        "CHUNK": cache_write.chunk(problem["batch"], tokens),
        "HEAD_DIM": problem["head_dim"],
        "PAGE_SIZE": problem["page_size"],
        "INTERLEAVED": problem["style"] == "interleaved",
        "HAS_SCALES": problem["has_scales"],
        "PAGE_SCALES": problem["page_scales"],
        "BIAS": problem["bias"],
    }


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    step = triton.step(
        KERNELS + "naive",
        (problem["tokens"], _heads(problem), 1),
        _pointers(problem) | _sizes(problem) | {"eps": triton.real(problem["eps"])},
        {**_constants(problem, 1), "BLOCK_K": NAIVE_BLOCK_K},
        num_warps=4,
    )
    return Program((step,))


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, splits, block_k = problem["tokens"], config["split_k"], config["block_k"]
    if not tokens:
        return Program(())
    heads, block_t = _heads(problem), streamed.block_t(tokens)
    groups, depth = ceil(tokens / block_t), ceil(problem["hidden"] / splits / block_k) * block_k
    step = dependent_step(
        gpu,
        KERNELS + "tiled",
        (heads, splits, groups),
        _pointers(problem)
        | {"squares": triton.pointer("squares", "float32")}
        | split_k.arguments()
        | {"tokens": triton.integer(tokens, divisor=1)}
        | _sizes(problem)
        | {"split_depth": triton.integer(depth), "eps": triton.real(problem["eps"])},
        {
            **_constants(problem, block_t),
            # The largest float16 is so small that x times norm_weight may exceed it.
            "SCALES_FIRST": problem["dtype"] == "float16",
            "SPLIT_K": splits,
            "PARTS": next_power_of_two(splits),
            "BLOCK_T": block_t,
            "BLOCK_K": block_k,
        },
        num_warps=_warps(problem),
        num_stages=config["stages"],
    )
    num_splits = heads * groups * splits if splits > 1 else 0
    workspaces = {
        "squares": 4 * num_splits * block_t,
        "partials": 4 * num_splits * block_t * problem["head_dim"],
        "arrivals": 4 * heads * groups,
    }
    return Program((step,), workspaces)


def _warps(problem: Problem) -> int:
    """Warps of a program of `tiled`."""
    return 4 if problem["head_dim"] == 64 else 8


def _stage_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a stage takes: a head's weights, x and norm_weight."""
    rows = problem["head_dim"] + streamed.block_t(problem["tokens"]) + 1
    return 2 * int(rows) * int(config["block_k"])


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


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tokens, stages = problem["tokens"], config["stages"]
    if tokens > MAX_GRID_Y * streamed.MAX_BLOCK_T:
        return f"tokens={tokens} are more than {MAX_GRID_Y * streamed.MAX_BLOCK_T} of a grid"
    if problem["kv_dtype"] == FP8 and illegal_float8(gpu):
        return illegal_float8(gpu)
    operand_bytes = 2 * streamed.block_t(tokens) * config["block_k"]  # x, normalized
    num_bytes = _stage_bytes(problem, config) * stages + operand_bytes + streamed.RESERVED_BYTES
    return illegal_stages(stages, num_bytes, gpu)


def _num_tiles(problem: Problem) -> int:
    return _heads(problem) * ceil(problem["tokens"] / streamed.block_t(problem["tokens"]))


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["tokens"] > MANY_TOKENS:
        return f"{problem['tokens']} tokens are many for tiles of 64"
    return streamed.unpromising_splits(
        config["split_k"], _num_tiles(problem), problem["hidden"], config["block_k"],
        problem["head_dim"] * streamed.block_t(problem["tokens"]), _warps(problem), gpu,
    )  # fmt: skip


def _estimate_tiled(problem: Problem, config: Config, gpu: Gpu) -> float:
    splits = config["split_k"]
    stream_us = streamed.stream_us(
        ENTRY.bytes_moved(problem), max(_num_tiles(problem) * splits, 1),
        _stage_bytes(problem, config), config["stages"], _warps(problem), gpu,
    )  # fmt: skip
    return stream_us + LOOKUP_US + streamed.LAST_SPLIT_US * (splits > 1)


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

TILED = Implementation(
    entry="qkv_rope_write",
    language="triton",
    variant="tiled",
    summary="a head of a group of tokens a program, tensor cores, split-K; normalized on the fly",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate_tiled,
    techniques={"asynchronous copies": "LDGSTS"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
