"""Decode in equal ranges: every program takes as many tiles of cached tokens as any other.

A head here is a key-value head of one sequence. The tiles of all heads follow one another in one
sequence of tiles, which is cut into a range for each program. It is cut on the device and at each
launch, so that a captured graph is right after lengths and tables have changed. A range cuts at
most two heads. Programs write partial results for heads that are cut, and the last program to
arrive merges them, as in flash-decoding.

The tiles of the same key-value head in all sequences follow one another, so that programs read the
same tokens of different heads at about the same time. This matters where one sector of memory
has rows or block scales of several heads.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.ranges import partial_slot, program_of
from kernelcat.kernels.triton.common.device.softmax import MIN_SCORE
from kernelcat.kernels.triton.paged_attn.tile import attend, finish, load_rows


@triton.jit
def tiles_of(kv_len, q_len, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile with keys visible to queries of a sequence, and the number of such tiles.

    The number is 1 where no key is visible (out and lse are still to be written), and 0 without
    queries.
    """
    first = kv_len * 0
    if WINDOW:
        first = tl.maximum(kv_len - q_len + 1 - window, 0) // BLOCK_N
    count = tl.maximum(tl.cdiv(kv_len, BLOCK_N) - first, 1)
    return first, tl.where(q_len > 0, count, 0)


@triton.jit
def merge(partials, sums, first, last, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Merge the partial results of programs first .. last, in this order.

    Returns acc (BLOCK_M, HEAD_DIM), row_max and row_sum (BLOCK_M,).
    """
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max, row_sum = tl.full((BLOCK_M,), MIN_SCORE, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for program in range(first, last + 1):
        slot = partial_slot(program, program == first)
        row = slot.to(tl.int64) * BLOCK_M + rows
        part_max = tl.load(sums + 2 * row, cache_modifier=".cg")
        part_sum = tl.load(sums + 2 * row + 1, cache_modifier=".cg")
        offsets = row[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(partials + offsets, cache_modifier=".cg")
        new_max = tl.maximum(row_max, part_max)
        rescale, part_rescale = tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)
        row_sum = row_sum * rescale + part_sum * part_rescale
        acc = acc * rescale[:, None] + part * part_rescale[:, None]
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def split(
    q, k_cache, v_cache, block_table, kv_lens, cu_q, sinks, k_scale, v_scale,
    k_block_scale, v_block_scale, out, lse, partials, sums, arrivals,
    batch, width, window, scale, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    BATCH: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A range of tiles a program; BLOCK_M is at least the rows of a head.

    partials (2 * NUM_PROGRAMS, BLOCK_M, HEAD_DIM) float32
    sums (2 * NUM_PROGRAMS, BLOCK_M, 2) float32: row_max and row_sum of each partial result
    arrivals (batch * KV_HEADS) int32, zero before and after
    BATCH: a power of two that is at least batch
    """
    HEADS: tl.constexpr = GROUP * KV_HEADS
    program = tl.program_id(0).to(tl.int64)
    seqs = tl.arange(0, BATCH)
    q_begin = tl.load(cu_q + seqs, mask=seqs < batch, other=0)
    q_end = tl.load(cu_q + seqs + 1, mask=seqs < batch, other=0)
    lens = tl.load(kv_lens + seqs, mask=seqs < batch, other=0)
    _, counts = tiles_of(lens, q_end - q_begin, window, WINDOW, BLOCK_N)
    ends = tl.cumsum(counts, 0)
    head_tiles = tl.sum(counts, 0).to(tl.int64)
    total_tiles = head_tiles * KV_HEADS
    num_ranges = tl.minimum(total_tiles, NUM_PROGRAMS)  # so that none of the ranges is empty
    at, range_end = total_tiles, total_tiles
    if program < num_ranges:
        at = total_tiles * program // num_ranges
        range_end = total_tiles * (program + 1) // num_ranges
    row = tl.arange(0, BLOCK_M)
    while at < range_end:
        head, in_head = (at // head_tiles).to(tl.int32), (at % head_tiles).to(tl.int32)
        seq = tl.sum((ends <= in_head).to(tl.int32), 0)
        start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
        q_len = tl.load(cu_q + seq + 1) - start
        first, count = tiles_of(kv_len, q_len, window, WINDOW, BLOCK_N)
        tile = in_head - (tl.sum(tl.where(seqs == seq, ends, 0), 0) - count)
        num_tiles = tl.minimum(count - tile, (range_end - at).to(tl.int32))

        rows = load_rows(q, row, q_len, start, head, HEADS, GROUP, HEAD_DIM)
        begin = (first + tile) * BLOCK_N
        acc, row_max, row_sum = attend(
            rows, begin, tl.minimum(begin + num_tiles * BLOCK_N, kv_len), kv_len - q_len + 1,
            kv_len - q_len + row // GROUP, head, kv_len, k_cache, v_cache,
            block_table + seq.to(tl.int64) * width, k_scale, v_scale, k_block_scale, v_block_scale,
            window, scale, softcap, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP,
            HAS_SCALES, PAGE_SCALES, NVFP4, STAGES, TMA,
        )  # fmt: skip
        is_last = num_tiles == count
        if num_tiles < count:
            dims = tl.arange(0, HEAD_DIM)
            part_row = partial_slot(program, tile == 0) * BLOCK_M + row
            tl.store(sums + 2 * part_row, row_max)
            tl.store(sums + 2 * part_row + 1, row_sum)
            tl.store(partials + part_row[:, None] * HEAD_DIM + dims[None, :], acc)
            tl.debug_barrier()  # all threads store their partial results before one thread counts
            head_begin = at - tile
            first_program = program_of(head_begin, total_tiles, num_ranges)
            last_program = program_of(head_begin + count - 1, total_tiles, num_ranges)
            head_arrivals = arrivals + seq * KV_HEADS + head
            arrived = tl.atomic_add(head_arrivals, 1, sem="acq_rel")
            is_last = arrived == last_program - first_program
            if is_last:
                tl.store(head_arrivals, 0)
                acc, row_max, row_sum = merge(
                    partials, sums, first_program, last_program, BLOCK_M, HEAD_DIM
                )
        if is_last:
            finish(
                acc, row_max, row_sum, row, q_len, start, head, sinks, out, lse,
                HEADS, GROUP, HEAD_DIM, HAS_SINKS,
            )  # fmt: skip
        tl.debug_barrier()  # all threads are done with shared memory before the next head uses it
        at += num_tiles
