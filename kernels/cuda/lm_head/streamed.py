"""`lm_head` for few tokens: rows of w stream once through rings in shared memory.

The product of `gemm/cuda/streamed`. Thread blocks stay for the whole vocabulary, so memory is busy
from the first row to the last, and one launch also finds the first tokens.
"""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Int32, Pointer, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.streamed_product import (
    SPACE,
    StreamedProduct,
    unpromising_product,
    why_no_room,
    why_not_streamed,
)
from kernelcat.kernels.cuda.lm_head.lists import lists_bytes
from kernelcat.runtime.gpu import Gpu

MAX_TOKENS = 8
"""A warp has a list in registers for each."""
EXTRA_BYTES = 1
"""Bytes of ListedLogits::Extra, which is empty."""
MERGE_US = 2.0
"""The last thread block loads the lists of all."""
RANK_US = 0.4
"""And finds one more token of each row."""


def _product(problem: Problem, config: Config, gpu: Gpu) -> StreamedProduct:
    sizes = problem["vocab"], problem["hidden"], problem["tokens"]
    return StreamedProduct.of(*sizes, EXTRA_BYTES, config, gpu, 3 * _num_lists(problem))


def _num_lists(problem: Problem) -> int:
    """kLists: of a warp. Each takes two registers of a thread, and its search one."""
    return 1 << (int(problem["tokens"]) - 1).bit_length()


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    product = _product(problem, config, gpu)
    source = instance(
        "lm_head/streamed.cu", "lm_head_streamed", problem["dtype"], problem["logits_dtype"],
        _num_lists(problem), *product.constants,
    )  # fmt: skip
    step = Step(
        source,
        (product.grid, 1, 1),
        (
            *map(Pointer, ("x", "w", "values", "ids", "logits", "found", "counter")),
            *(Int32(problem[name]) for name in ("tokens", "vocab", "hidden", "top_k")),
        ),
        product.num_threads,
        product.shared_bytes,
        programmatic=True,
    )
    found_bytes = lists_bytes(product.grid * _num_lists(problem))
    return Program((step,), {"found": found_bytes, "counter": 4})


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["tokens"] > MAX_TOKENS:
        return f"tokens={problem['tokens']} are more than the {MAX_TOKENS} with lists in registers"
    if why := why_not_streamed(problem["tokens"], config, hidden=problem["hidden"]):
        return why
    return why_no_room(_product(problem, config, gpu), gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_product(_product(problem, config, gpu))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    product = _product(problem, config, gpu)
    return product.us(gpu) + LAUNCH_US + MERGE_US + RANK_US * problem["top_k"]


IMPLEMENTATION = Implementation(
    entry="lm_head",
    language="cuda",
    variant="streamed",
    summary="up to 8 tokens, one launch: bulk copies of rows of w into a ring, mma.sync, lists",
    archs=("sm_90+",),
    space=SPACE,
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=_estimate,
    techniques={
        "mma.sync": "HMMA",
        "bulk copies": "UBLKCP",
        "mbarrier": "SYNCS",
        "votes of a warp": "VOTE",
    },
    rank=2,
    unverified="right on the host, not run on a GPU",
)
