"""Triton kernels of `all_reduce`: words that are their own flags in slots, and the norm."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.windows import (
    begin_epoch,
    end_epoch,
    halves,
    joined,
    on_wire,
    report,
    slots_of,
    take,
)


@triton.jit
def slots(
    x,  # int32: pairs of elements
    residual,  # like x, with HAS_RESIDUAL
    out,  # like x
    begin, num_words, slot_words, rank,
    window0, window1, window2, window3, window4, window5, window6, window7,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sums of num_words words of x, from begin on, over the ranks.

    slot_words is the room of each sender. The windows are those of the ranks from this one on,
    around.
    """
    await_previous(DEPENDENT)
    x += begin
    out += begin
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    windows = (window0, window1, window2, window3, window4, window5, window6, window7)
    epoch, tries = begin_epoch(window0, program)
    for first in range(program * BLOCK, num_words, num_programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_words
        words = tl.load(x + at, mask=mask, other=0)
        for shift in tl.static_range(1, RANKS):
            places = slots_of(windows[shift], epoch) + rank * slot_words + at
            tl.store(places, on_wire(words), mask=mask)
    for first in range(program * BLOCK, num_words, num_programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_words
        mine = tl.load(x + at, mask=mask, other=0)
        low, high = halves(mine, IS_BFLOAT16)
        if HAS_RESIDUAL:
            added = tl.load(residual + begin + at, mask=mask, other=0)
            low, high = halves(added, IS_BFLOAT16)
        for source in tl.static_range(RANKS):
            is_mine = tl.full([BLOCK], source, tl.int32) == rank
            places = slots_of(window0, epoch) + source * slot_words + at
            words, left = take(places, mask & ~is_mine, tries)
            report(window0, tries, left, source)
            tries = left
            part_low, part_high = halves(tl.where(is_mine, mine, words), IS_BFLOAT16)
            if source == 0 and not HAS_RESIDUAL:
                low, high = part_low, part_high
            else:
                low += part_low
                high += part_high
        tl.store(out + at, joined(low, high, IS_BFLOAT16), mask=mask)
    end_epoch(window0, epoch, program, num_programs)


@triton.jit
def normalize(
    h,  # (rows, hidden)
    weight,  # (hidden,)
    normed,  # (rows, hidden)
    hidden, eps, COLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """RMSNorm of a row a program."""
    await_previous(DEPENDENT)
    cols = tl.arange(0, COLS)
    mask = cols < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + cols
    values = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)
    weights = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + at, (values * factor * weights).to(normed.dtype.element_ty), mask=mask)
