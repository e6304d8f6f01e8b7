"""Triton kernel of `moe_combine`: sums in slots of their token's rank, which adds them up."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.windows import (
    begin_epoch,
    end_epoch,
    flagged,
    flagged_words_of,
    halves,
    joined,
    on_wire,
    report,
    slots_of,
    take,
    wait_for_greetings,
)


@triton.jit
def combine(
    sums,  # (RANKS * tokens, words) int32: pairs of elements
    row_of,  # (RANKS, tokens)
    expert_ids,  # (tokens, top_k)
    residual,  # (tokens, words), with HAS_RESIDUAL
    out,  # (tokens, words)
    begin, count, tokens, words, top_k, local_experts, rank,
    window0, window1, window2, window3, window4, window5, window6, window7,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The sums of ``count`` tokens of every rank, from ``begin`` on; TOP_K is a power of two.

    Program 0 greets the ranks: with no row for another one, a rank still says that it has begun.
    """
    await_previous(DEPENDENT)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    windows = (window0, window1, window2, window3, window4, window5, window6, window7)
    epoch, tries = begin_epoch(window0, program)
    if program == 0:
        for shift in tl.static_range(1, RANKS):
            tl.store(flagged_words_of(windows[shift], epoch, rank), flagged(epoch * 0, epoch))
    for i in range(program, count, num_programs):
        for shift in tl.static_range(1, RANKS):
            peer = (rank + shift) % RANKS
            row = tl.load(row_of + peer * tokens + begin + i)
            slot = slots_of(windows[shift], epoch) + (rank * count + i).to(tl.int64) * words
            for first in range(0, words, BLOCK):
                at = first + tl.arange(0, BLOCK)
                mask = at < tl.where(row >= 0, words, 0)
                sent = tl.load(sums + row.to(tl.int64) * words + at, mask=mask, other=0)
                tl.store(slot + at, on_wire(sent), mask=mask)
    slot_of_k = tl.arange(0, TOP_K)
    for i in range(program, count, num_programs):
        token = (begin + i).to(tl.int64)
        ids = tl.load(expert_ids + token * top_k + slot_of_k, mask=slot_of_k < top_k, other=-1)
        holders = tl.where(ids < 0, -1, ids // local_experts)
        own_row = tl.load(row_of + rank * tokens + token).to(tl.int64)
        for first in range(0, words, BLOCK):
            at = first + tl.arange(0, BLOCK)
            mask = at < words
            is_held = at < tl.where(own_row >= 0, words, 0)
            mine = tl.load(sums + own_row * words + at, mask=is_held, other=0)
            low, high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            if HAS_RESIDUAL:
                low, high = halves(
                    tl.load(residual + token * words + at, mask=mask, other=0), IS_BFLOAT16
                )
            for source in tl.static_range(RANKS):
                serves = tl.max((holders == source).to(tl.int32), axis=0) != 0
                is_mine = tl.full([BLOCK], source, tl.int32) == rank
                places = slots_of(window0, epoch) + (source * count + i).to(tl.int64) * words + at
                come, left = take(places, (at < tl.where(serves, words, 0)) & ~is_mine, tries)
                report(window0, tries, left, source)
                tries = left
                part_low, part_high = halves(tl.where(is_mine, mine, come), IS_BFLOAT16)
                low = tl.where(serves, low + part_low, low)
                high = tl.where(serves, high + part_high, high)
            tl.store(out + token * words + at, joined(low, high, IS_BFLOAT16), mask=mask)
    if program == 0:
        wait_for_greetings(window0, epoch, rank, tries, RANKS)
    end_epoch(window0, epoch, program, num_programs)
