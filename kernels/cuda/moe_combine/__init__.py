"""`moe_combine` in CUDA C++: ll (words that are their own flags) and tiles (rings with signals).

Ranks write to each other's windows (``kernelcat/window.cuh``) and never read them.
"""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.expert_exchange import (
    THREADS,
    Exchange,
    row_blocks,
    tile_tokens,
    tokens_of_block,
)
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.windows import SHARED_BYTES, why_not_resident, window_params
from kernelcat.runtime.gpu import Gpu


def _wire_bytes(problem: Problem) -> int:
    return int(problem["hidden"] * 2)


def _num_blocks(problem: Problem, config: Config) -> int:
    """Thread blocks; with slots the first one greets the ranks."""
    return row_blocks(problem, config) + (tile_tokens(config) == 0)


def _shared_bytes(problem: Problem, config: Config) -> int:
    """The ranks of each token of a thread block, and its rows on all ranks, for rings."""
    if not tile_tokens(config):
        return 0
    return int(tokens_of_block(problem, config) * (4 * problem["ranks"] + 1))


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if problem["tokens"] == 0:
        return Program(())
    programmatic = has_dependent_launch(gpu)
    source = instance(
        "moe_combine/combine.cu", "moe_combine",
        problem["dtype"], problem["ranks"], tile_tokens(config), THREADS, programmatic,
    )  # fmt: skip
    tensors = ("sums", "row_of", "expert_ids", "residual", "out")
    axes = (problem[axis] for axis in ("tokens", "hidden", "top_k", "local_experts"))
    params = (*map(Pointer, tensors), *map(Int32, axes), *window_params())
    step = Step(source, (_num_blocks(problem, config), 1, 1), params, THREADS,
                _shared_bytes(problem, config), programmatic=programmatic,
                max_carveout=True)  # fmt: skip
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _shared_bytes(problem, config) > SHARED_BYTES:
        return f"the rows of {problem['tokens']} tokens do not fit into shared memory: more blocks"
    return why_not_resident(_num_blocks(problem, config), gpu)


def _nothing_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return 0.0


IMPLEMENTATIONS = Exchange(
    "moe_combine", _program, _wire_bytes, _illegal, trips=1, beside_us=_nothing_us
).implementations(techniques={})
