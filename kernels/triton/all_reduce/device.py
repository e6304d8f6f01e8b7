"""Triton kernels of `all_reduce`: words that are their own flags in slots, and the norm.

kernels/cuda/include/kernelcat/row_slots.cuh has the protocol, and window.cuh the places.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous


@triton.jit
def words_at(address, byte):
    """A pointer to 32-bit words at ``byte`` of the window at ``address``."""
    return (address + byte).to(tl.pointer_type(tl.int32))


@triton.jit
def halves(words, IS_BFLOAT16: tl.constexpr):
    """Both 16-bit elements of each word as float32: the one at the lower address first."""
    low, high = (words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)
    if IS_BFLOAT16:
        return (
            low.to(tl.bfloat16, bitcast=True).to(tl.float32),
            high.to(tl.bfloat16, bitcast=True).to(tl.float32),
        )
    else:
        return (
            low.to(tl.float16, bitcast=True).to(tl.float32),
            high.to(tl.float16, bitcast=True).to(tl.float32),
        )


@triton.jit
def rounded_bits(values, IS_BFLOAT16: tl.constexpr):
    """The bits of float32 values that are rounded to 16 bits, in int32."""
    if IS_BFLOAT16:
        bits = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = values.to(tl.float16).to(tl.int16, bitcast=True)
    return bits.to(tl.int32) & 0xFFFF


@triton.jit
def take(places, mask, tries):
    """The words at ``places`` once all have arrived, or ``tries`` is over; and what is left of it.

    Zeros stay behind.
    """
    words = tl.load(places, mask=mask, other=-1, volatile=True)
    while (tl.min((words != 0).to(tl.int32), axis=0) == 0) & (tries > 0):
        words = tl.load(places, mask=mask, other=-1, volatile=True)
        tries -= 1
    tl.store(places, tl.zeros_like(words), mask=mask)
    return ~words, tries


@triton.jit
def slots(
    x,  # int32: pairs of elements
    residual,  # like x, with HAS_RESIDUAL
    out,  # like x
    begin, num_words, rank, window0, window1, window2, window3, window4, window5, window6, window7,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ERROR: tl.constexpr, SLOTS: tl.constexpr, HALF: tl.constexpr,
    COPIES: tl.constexpr, TRIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sums of num_words words of x, from begin on, over the ranks.

    The windows are those of the ranks from this one on, around.
    """
    await_previous(DEPENDENT)
    x += begin
    out += begin
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    windows = (window0, window1, window2, window3, window4, window5, window6, window7)
    epoch = tl.load(words_at(window0, program * 4), volatile=True) + 1
    has_failed = tl.load(words_at(window0, ERROR), volatile=True) != 0
    tries = tl.where(has_failed, 0, TRIES)
    half = SLOTS + (epoch & 1).to(tl.int64) * HALF
    for first in range(program * BLOCK, num_words, num_programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < num_words
        words = tl.load(x + at, mask=mask, other=0)
        sent = tl.where(words == -1, -2147483648, ~words)
        for shift in tl.static_range(1, RANKS):
            tl.store(words_at(windows[shift], half) + rank * num_words + at, sent, mask=mask)
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
            places = words_at(window0, half) + source * num_words + at
            words, left = take(places, mask & ~is_mine, tries)
            if (left == 0) & (tries > 0):
                tl.store(words_at(window0, ERROR), 1 + source)
            tries = left
            part_low, part_high = halves(tl.where(is_mine, mine, words), IS_BFLOAT16)
            if source == 0 and not HAS_RESIDUAL:
                low, high = part_low, part_high
            else:
                low += part_low
                high += part_high
        tl.store(
            out + at,
            rounded_bits(low, IS_BFLOAT16) | (rounded_bits(high, IS_BFLOAT16) << 16),
            mask=mask,
        )
    tl.debug_barrier()  # all threads have read the epoch
    copies = program + tl.arange(0, COPIES) * num_programs
    tl.store(words_at(window0, 0) + copies, epoch, mask=copies < COPIES)


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
