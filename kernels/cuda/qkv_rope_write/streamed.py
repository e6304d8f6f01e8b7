"""`qkv_rope_write` for few tokens: weights stream once through rings in shared memory."""

from __future__ import annotations

from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.cache_write import head_writer, num_heads
from kernelcat.kernels.cuda.common.streamed_product import (
    GROUP_ROWS,
    SPACE,
    StreamedProduct,
    unpromising_product,
    why_no_room,
    why_not_streamed,
)
from kernelcat.kernels.cuda.qkv_rope_write.naive import params
from kernelcat.runtime.gpu import Gpu

EXTRA_BYTES = 16
"""Bytes of HeadOutput::Extra: two biases, a cosine, a sine and a scale."""
SLOT_BYTES = 8
"""Bytes of a TokenSlot: a position and a page."""
AHEAD_US = 1.0
"""Microseconds by which copies are ahead of the product's model; with it the model has an H200's
times at 1 and 8 tokens to 0.5 us."""
NORM_US = 4.5e-5
"""Microseconds to normalize an activation, in all thread blocks at once: an H200's times at 64
tokens."""


def _product(problem: Problem, config: Config, gpu: Gpu) -> StreamedProduct:
    rows = num_heads(problem) * problem["head_dim"]
    return StreamedProduct.of(rows, problem["hidden"], problem["tokens"], EXTRA_BYTES, config, gpu)


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    product = _product(problem, config, gpu)
    step = Step(
        head_writer(problem, "streamed", *product.constants),
        (product.grid, 1, 1),
        params(problem),
        product.num_threads,
        product.shared_bytes + SLOT_BYTES * product.padded_tokens,
        programmatic=True,
    )
    return Program((step,))


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if why := why_not_streamed(problem["tokens"], config, hidden=problem["hidden"]):
        return why
    if problem["style"] == "neox" and problem["rotary_dim"] % GROUP_ROWS:
        return (
            f"rotary_dim={problem['rotary_dim']} must be a multiple of {GROUP_ROWS}: the rows of a "
            "stage are whole pairs of the rotation"
        )
    product = _product(problem, config, gpu)
    return why_no_room(product, gpu, SLOT_BYTES * product.padded_tokens)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_product(_product(problem, config, gpu))


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The product, and the norm of all activations in each thread block."""
    norm_us = NORM_US * problem["tokens"] * problem["hidden"]
    return _product(problem, config, gpu).us(gpu) + norm_us - AHEAD_US


IMPLEMENTATION = Implementation(
    entry="qkv_rope_write",
    language="cuda",
    variant="streamed",
    summary="for few tokens: bulk copies of rows into a ring, mma.sync; one launch",
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
        "dependent launch": "ACQBULK",
    },
    rank=1,
)
