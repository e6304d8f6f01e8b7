"""Triton kernels of `moe_dispatch`: rows in slots, and the numbers of the tokens that come.

A row on the wire is data_words words of activations, num_scales scales of float8, and the weights
of the token's experts; row_words has room for them.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.fp8 import quantize_rows
from kernelcat.kernels.triton.common.device.windows import (
    begin_epoch,
    end_epoch,
    flagged,
    flagged_words_of,
    on_wire,
    report,
    slots_of,
    take,
    wait_for_flagged,
    wait_for_greetings,
)
from kernelcat.kernels.triton.moe_dispatch.maps import make_maps


@triton.jit
def quantized_words(x, first, hidden, BLOCK: tl.constexpr):
    """BLOCK words of x (hidden,) in float8, from word ``first`` on; and their scales as words."""
    GROUPS: tl.constexpr = BLOCK // 32
    at = first * 4 + tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)
    values = tl.load(x + at, mask=at < hidden, other=0.0).to(tl.float32)
    codes, scales = quantize_rows(values, tl.float8e4nv)
    bytes_of = tl.reshape(codes.to(tl.uint8, bitcast=True).to(tl.int32), [BLOCK, 4])
    words = tl.sum(bytes_of << (8 * tl.arange(0, 4))[None, :], axis=1)
    return words, scales.to(tl.int32, bitcast=True)


@triton.jit
def send(
    x,  # (tokens, hidden), as words unless IS_FLOAT8
    expert_ids,  # (tokens, top_k)
    weights,  # (tokens, top_k) int32: bits of float32
    begin, count, num_ids, hidden, top_k, local_experts, data_words, num_scales, row_words, rank,
    window0, window1, window2, window3, window4, window5, window6, window7,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, IS_FLOAT8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Send ``num_ids`` expert ids to all ranks, and the rows of ``count`` tokens from ``begin`` on.

    Program 0 greets the ranks. Ids are flagged words, after the greeting.
    """
    await_previous(DEPENDENT)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    windows = (window0, window1, window2, window3, window4, window5, window6, window7)
    epoch, _ = begin_epoch(window0, program)
    if program == 0:
        for shift in tl.static_range(RANKS):
            tl.store(flagged_words_of(windows[shift], epoch, rank), flagged(epoch * 0, epoch))
    for first in range(program * BLOCK, num_ids, num_programs * BLOCK):
        at = first + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids + at, mask=at < num_ids, other=-1)
        for shift in tl.static_range(RANKS):
            places = flagged_words_of(windows[shift], epoch, rank) + 1 + at
            tl.store(places, flagged(ids, epoch), mask=at < num_ids)
    k = tl.arange(0, TOP_K)
    for i in range(program, count, num_programs):
        token = (begin + i).to(tl.int64)
        ids = tl.load(expert_ids + token * top_k + k, mask=k < top_k, other=-1)
        weight = tl.load(weights + token * top_k + k, mask=k < top_k, other=0)
        holders = tl.where(ids < 0, -1, ids // local_experts)
        place = (rank * count + i).to(tl.int64) * row_words
        for shift in tl.static_range(RANKS):
            serves = tl.max((holders == (rank + shift) % RANKS).to(tl.int32), axis=0) != 0
            slot = slots_of(windows[shift], epoch) + place + data_words + num_scales
            tl.store(slot + k, on_wire(weight), mask=k < tl.where(serves, top_k, 0))
        for first in range(0, data_words, BLOCK):
            at = first + tl.arange(0, BLOCK)
            if IS_FLOAT8:
                data, scales = quantized_words(x + token * hidden, first, hidden, BLOCK)
                block = first // 32 + tl.arange(0, BLOCK // 32)
            else:
                data = tl.load(x + token * data_words + at, mask=at < data_words, other=0)
            for shift in tl.static_range(RANKS):
                serves = tl.max((holders == (rank + shift) % RANKS).to(tl.int32), axis=0) != 0
                slot = slots_of(windows[shift], epoch) + place
                tl.store(slot + at, on_wire(data), mask=at < tl.where(serves, data_words, 0))
                if IS_FLOAT8:
                    tl.store(
                        slot + data_words + block, on_wire(scales),
                        mask=block < tl.where(serves, num_scales, 0),
                    )  # fmt: skip


@triton.jit
def arrive(
    ids,  # (RANKS * tokens, top_k)
    numbers,  # (RANKS * tokens,)
    counts,  # (RANKS * chunks,)
    tokens, chunks, top_k, local_experts, rank,
    window0, window1, window2, window3, window4, window5, window6, window7,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Take the ids of a chunk of CHUNK tokens of one rank, of which each rank has ``chunks``.

    numbers : which of the chunk's tokens that come to this rank a token is; -1 where it does not
    counts : how many tokens of the chunk come
    """
    await_previous(DEPENDENT)
    program = tl.program_id(0)
    source = program // chunks
    epoch, tries = begin_epoch(window0, 0)
    token = program % chunks * CHUNK + tl.arange(0, CHUNK)
    k = tl.arange(0, TOP_K)[None, :]
    mask = (token < tokens)[:, None] & (k < top_k)
    at = token[:, None] * top_k + k
    words = flagged_words_of(window0, epoch, source) + 1
    found, left = wait_for_flagged(words + at, mask, epoch, tries)
    report(window0, tries, left, source)
    tl.store(ids + source.to(tl.int64) * tokens * top_k + at, found, mask=mask)
    is_here = mask & (found >= 0) & (found // local_experts == rank)
    comes = tl.max(is_here.to(tl.int32), axis=1)
    number = tl.where(comes != 0, tl.cumsum(comes, axis=0) - 1, -1)
    tl.store(numbers + source * tokens + token, number, mask=token < tokens)
    tl.store(counts + program, tl.sum(comes, axis=0))


@triton.jit
def receive(
    rows,  # (RANKS * tokens, data_words)
    scale,  # (num_scales, RANKS * tokens) int32: bits of float32
    gates,  # (RANKS * tokens, top_k) int32: bits of float32
    row_of,  # (RANKS, tokens)
    source_offsets,  # (RANKS + 1,)
    offsets,  # (local_experts + 1,)
    order,  # (RANKS * tokens * top_k,)
    position,  # (RANKS * tokens, top_k)
    ids,  # (RANKS * tokens, top_k)
    numbers,  # (RANKS * tokens,)
    counts,  # (RANKS * chunks,)
    begin, count, tokens, chunks, top_k, local_experts, data_words, num_scales, row_words,
    map_programs, rank,
    window0, window1, window2, window3, window4, window5, window6, window7,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, IS_FLOAT8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Take the rows of ``count`` tokens of every rank from ``begin`` on.

    The first ``map_programs`` programs make the index maps. TAIL and CHUNKS are powers of two, no
    less than the words after the data, and than RANKS * chunks.
    """
    await_previous(DEPENDENT)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch, tries = begin_epoch(window0, program)
    if program < map_programs:
        make_maps(
            source_offsets, offsets, order, position, ids, numbers, counts, tokens, chunks, top_k,
            local_experts, map_programs, rank, RANKS, TOP_K, CHUNK, CHUNKS,
        )  # fmt: skip
    else:
        chunk = tl.arange(0, CHUNKS)
        in_chunk = tl.load(counts + chunk, mask=chunk < RANKS * chunks, other=0)
        after = tl.arange(0, TAIL)
        for i in range(program - map_programs, count, num_programs - map_programs):
            token = begin + i
            for shift in tl.static_range(RANKS):
                source = (rank + shift) % RANKS
                number = tl.load(numbers + source * tokens + token)
                before = tl.where(chunk < source * chunks + token // CHUNK, in_chunk, 0)
                row = tl.where(number < 0, -1, number + tl.sum(before, axis=0)).to(tl.int64)
                comes = number >= 0
                tl.store(row_of + source * tokens + token, row.to(tl.int32))
                slot = slots_of(window0, epoch) + (source * count + i).to(tl.int64) * row_words
                mask = after < tl.where(comes, num_scales + top_k, 0)
                words, left = take(slot + data_words + after, mask, tries)
                if IS_FLOAT8:
                    place = after.to(tl.int64) * (RANKS * tokens) + row
                    tl.store(scale + place, words, mask=mask & (after < num_scales))
                gate = gates + row * top_k + after - num_scales
                tl.store(gate, words, mask=mask & (after >= num_scales))
                for first in range(0, data_words, BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    is_data = at < tl.where(comes, data_words, 0)
                    data, left = take(slot + at, is_data, left)
                    tl.store(rows + row * data_words + at, data, mask=is_data)
                report(window0, tries, left, source)
                tries = left
    if program == num_programs - 1:
        wait_for_greetings(window0, epoch, rank, tries, RANKS)
    end_epoch(window0, epoch, program, num_programs)
