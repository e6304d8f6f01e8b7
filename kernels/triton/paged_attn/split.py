"""Decode in equal shares: every program takes as many tiles of keys and values as any other.

The tiles of all key-value heads and their sequences stand in one row, which is cut into a share for
each program, on the device and at each launch: a captured graph is right after lengths and tables
have changed. A share has at most two heads of which it holds a piece only; of those the last
program to arrive adds up the pieces (flash-decoding; the shares are FlashMLA's and stream-K's).
Heads stand outermost so that programs read the same tokens of different heads at about the same
time, which matters where a sector of memory has rows or block scales of several.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.paged_attn.tile import LOWEST, attend, finish, load_rows


@triton.jit
def tiles_of(kv_len, q_len, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile that the queries of a sequence see, and how many; one where they see nothing."""
    first = kv_len * 0
    if WINDOW:
        first = tl.maximum(kv_len - q_len + 1 - window, 0) // BLOCK_N
    count = tl.maximum(tl.cdiv(kv_len, BLOCK_N) - first, 1)
    return first, tl.where(q_len > 0, count, 0)


@triton.jit
def program_of(tile, total, programs):
    """Whose share a tile is in: program p's begins at total * p // programs."""
    return ((tile + 1) * programs - 1) // total


@triton.jit
def merge(partials, sums, first, last, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The sum of the pieces that programs first .. last have left, in order."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    most, total = tl.full((BLOCK_M,), LOWEST, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for program in range(first, last + 1):
        # A head begins in the second piece of its first program, and goes on in first pieces.
        slot = 2 * program + tl.where(program == first, 1, 0)
        at = slot.to(tl.int64) * BLOCK_M + rows
        its_most = tl.load(sums + 2 * at, cache_modifier=".cg")
        its_total = tl.load(sums + 2 * at + 1, cache_modifier=".cg")
        piece_at = at[:, None] * HEAD_DIM + dims[None, :]
        piece = tl.load(partials + piece_at, cache_modifier=".cg")
        highest = tl.maximum(most, its_most)
        shrink, its_shrink = tl.exp2(most - highest), tl.exp2(its_most - highest)
        total = total * shrink + its_total * its_shrink
        acc = acc * shrink[:, None] + piece * its_shrink[:, None]
        most = highest
    return acc, most, total


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
    """partials (2 * programs, BLOCK_M, HEAD_DIM) and sums (.., BLOCK_M, 2: most, total) float32,
    arrivals (batch * KV_HEADS) int32, zero before and after. BATCH >= batch is a power of two."""
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
    programs = tl.minimum(total_tiles, NUM_PROGRAMS)  # none of which has an empty share
    at, share_end = total_tiles, total_tiles
    if program < programs:
        at = total_tiles * program // programs
        share_end = total_tiles * (program + 1) // programs
    row = tl.arange(0, BLOCK_M)
    while at < share_end:
        head, in_head = (at // head_tiles).to(tl.int32), (at % head_tiles).to(tl.int32)
        seq = tl.sum((ends <= in_head).to(tl.int32), 0)
        start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
        q_len = tl.load(cu_q + seq + 1) - start
        first, count = tiles_of(kv_len, q_len, window, WINDOW, BLOCK_N)
        tile = in_head - (tl.sum(tl.where(seqs == seq, ends, 0), 0) - count)
        num_tiles = tl.minimum(count - tile, (share_end - at).to(tl.int32))

        rows = load_rows(q, row, q_len, start, head, HEADS, GROUP, HEAD_DIM)
        begin = (first + tile) * BLOCK_N
        acc, most, total = attend(
            rows, begin, tl.minimum(begin + num_tiles * BLOCK_N, kv_len), kv_len - q_len + 1,
            kv_len - q_len + row // GROUP, head, kv_len, k_cache, v_cache,
            block_table + seq.to(tl.int64) * width, k_scale, v_scale, k_block_scale, v_block_scale,
            window, scale, softcap, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP,
            HAS_SCALES, PAGE_SCALES, NVFP4, STAGES, TMA,
        )  # fmt: skip
        is_last = num_tiles == count
        if num_tiles < count:
            dims = tl.arange(0, HEAD_DIM)
            slot = (2 * program + tl.where(tile == 0, 1, 0)) * BLOCK_M + row
            tl.store(sums + 2 * slot, most)
            tl.store(sums + 2 * slot + 1, total)
            tl.store(partials + slot[:, None] * HEAD_DIM + dims[None, :], acc)
            tl.debug_barrier()  # every thread's pieces before the one thread that counts
            head_begin = at - tile
            first_program = program_of(head_begin, total_tiles, programs)
            last_program = program_of(head_begin + count - 1, total_tiles, programs)
            arrival = arrivals + seq * KV_HEADS + head
            before = tl.atomic_add(arrival, 1, sem="acq_rel")
            is_last = before == last_program - first_program
            if is_last:
                tl.store(arrival, 0)
                acc, most, total = merge(
                    partials, sums, first_program, last_program, BLOCK_M, HEAD_DIM
                )
        if is_last:
            finish(
                acc, most, total, row, q_len, start, head, sinks, out, lse,
                HEADS, GROUP, HEAD_DIM, HAS_SINKS,
            )  # fmt: skip
        tl.debug_barrier()  # shared memory is the next head's from here on
        at += num_tiles
