"""Equal ranges: every program takes as many tiles of cached tokens as any other.

A row tile is BLOCK_M rows of one sequence, and has the tiles of cached tokens that are visible to
its rows. These tiles of all row tiles follow one another, and are cut into a range for each
program. They are cut on the device and at each launch, so that a captured graph is right after
lengths and tables have changed. A range cuts at most two row tiles. Programs write partial results
for row tiles that are cut. The last program to arrive merges them, as in `paged_attn`, or a second
launch does, whose grid has enough programs for many partial results.

Row tile i is tile i // batch of sequence i % batch, so that programs read the same tokens for
different heads at about the same time, the later ones from L2.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.mla_row import LATENT
from kernelcat.kernels.triton.common.device.ranges import program_of
from kernelcat.kernels.triton.common.device.softmax import MIN_SCORE, finish_softmax
from kernelcat.kernels.triton.flashmla.tile import attend, finish, load_rows


@triton.jit
def count_tiles(
    batch, cu_q, kv_lens, HEADS, BLOCK_M, BLOCK_N,
    ROW_TILES: tl.constexpr, PADDED_TILES: tl.constexpr,
):  # fmt: skip
    """Indices, counts of visible tiles of tokens, and ends of the row tiles, (PADDED_TILES,) each.

    A count is 1 where no token is visible (out and lse are still to be written), and 0 for a row
    tile without rows. An end is where a row tile's tiles end among those of all row tiles.
    ROW_TILES is the number of row tiles of the longest sequence.
    """
    index = tl.arange(0, PADDED_TILES)
    seq, seq_row, inside = index % batch, index // batch * BLOCK_M, index < ROW_TILES * batch
    start = tl.load(cu_q + seq, mask=inside, other=0)
    q_len = tl.load(cu_q + seq + 1, mask=inside, other=0) - start
    kv_len = tl.load(kv_lens + seq, mask=inside, other=0)
    end = tl.minimum(kv_len, kv_len - q_len + (seq_row + BLOCK_M - 1) // HEADS + 1)
    counts = tl.where(seq_row < q_len * HEADS, tl.maximum(tl.cdiv(end, BLOCK_N), 1), 0)
    return index, counts, tl.cumsum(counts, 0)


@triton.jit
def part_slot(program, first):
    """Slot of a program's partial result for a row tile that begins in the range of `first`.

    It is `partial_slot` of common/device/ranges.py, written out here and in `split`: with a call
    Triton 3.6 orders the instructions of `split` differently.
    """
    return (2 * program + tl.where(program == first, 1, 0)).to(tl.int64)


@triton.jit
def merge(
    partials, sums, first, last, first_row, rows, out, lse,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge and store a row tile's partial results, those of programs first .. last.

    BLOCK_D columns at a time are merged. The tile has `rows` rows, from row `first_row` of out on.
    """
    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    row_max, row_sum = tl.full((BLOCK_M,), MIN_SCORE, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for program in range(first, last + 1):
        part_sums = sums + 2 * (part_slot(program, first) * BLOCK_M + row)
        part_max = tl.load(part_sums, cache_modifier=".cg")
        part_sum = tl.load(part_sums + 1, cache_modifier=".cg")
        new_max = tl.maximum(row_max, part_max)
        row_sum = row_sum * tl.exp2(row_max - new_max) + part_sum * tl.exp2(part_max - new_max)
        row_max = new_max
    row_sum, row_lse = finish_softmax(row_max, row_sum)
    tl.store(lse + first_row + row, row_lse, mask=row < rows)
    for first_dim in range(0, LATENT, BLOCK_D):
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for program in range(first, last + 1):
            part_row = part_slot(program, first) * BLOCK_M
            weight = tl.exp2(tl.load(sums + 2 * (part_row + row), cache_modifier=".cg") - row_max)
            part = partials + part_row * LATENT + first_dim + row[:, None] * LATENT + dims
            acc += tl.load(part, cache_modifier=".cg") * weight[:, None]
        target = out + first_row * LATENT + first_dim + row[:, None] * LATENT + dims
        result = (acc * (1.0 / row_sum)[:, None]).to(out.dtype.element_ty)
        tl.store(target, result, mask=(row < rows)[:, None])


@triton.jit
def merge_row(
    partials, sums, first, last, row, target, out, lse,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row of a row tile, PARTS partial results at a time, and store row `target` of out.

    `row` is the row's index in the tile; first and last are those of `merge`.
    """
    lane, dims = tl.arange(0, PARTS), tl.arange(0, LATENT)
    row_max, row_sum = -1.0e30, 0.0
    for program in range(first, last + 1, PARTS):
        inside = program + lane <= last
        part_sums = sums + 2 * (part_slot(program + lane, first) * BLOCK_M + row)
        part_max = tl.load(part_sums, mask=inside, other=MIN_SCORE)
        part_sum = tl.load(part_sums + 1, mask=inside, other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        parts_sum = tl.sum(part_sum * tl.exp2(part_max - new_max), 0)
        row_sum = row_sum * tl.exp2(row_max - new_max) + parts_sum
        row_max = new_max
    acc = tl.zeros((PARTS, LATENT), tl.float32)
    for program in range(first, last + 1, PARTS):
        inside = program + lane <= last
        part_row = part_slot(program + lane, first) * BLOCK_M + row
        weight = tl.exp2(tl.load(sums + 2 * part_row, mask=inside, other=MIN_SCORE) - row_max)
        part = partials + part_row[:, None] * LATENT + dims[None, :]
        acc += tl.load(part, mask=inside[:, None], other=0.0) * weight[:, None]
    row_sum, row_lse = finish_softmax(row_max, row_sum)
    result = tl.sum(acc, 0) * (1.0 / row_sum)
    tl.store(out + target * LATENT + dims, result.to(out.dtype.element_ty))
    tl.store(lse + target, row_lse)


@triton.jit
def split(
    q, latent, factor, rotated, block_table, kv_lens, cu_q, out, lse, partials, sums, arrivals,
    batch, width, scale,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BRANCHED: tl.constexpr,
    ROW_TILES: tl.constexpr, PADDED_TILES: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    LAST_MERGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A range of tiles of cached tokens a program.

    partials (2 * NUM_PROGRAMS, BLOCK_M, 512) float32
    sums (2 * NUM_PROGRAMS, BLOCK_M, 2) float32: row_max and row_sum of each partial result
    arrivals (ROW_TILES * batch) int32, zero before and after; without LAST_MERGES not used
    ROW_TILES: row tiles of the longest sequence
    PADDED_TILES: a power of two that is at least ROW_TILES * batch
    """
    program = tl.program_id(0).to(tl.int64)
    indices, counts, ends = count_tiles(
        batch, cu_q, kv_lens, HEADS, BLOCK_M, BLOCK_N, ROW_TILES, PADDED_TILES
    )  # fmt: skip
    total_tiles = tl.sum(counts, 0).to(tl.int64)
    num_ranges = tl.minimum(total_tiles, NUM_PROGRAMS)  # so that none of the ranges is empty
    at, range_end = total_tiles, total_tiles
    if program < num_ranges:
        at = total_tiles * program // num_ranges
        range_end = total_tiles * (program + 1) // num_ranges
    while at < range_end:
        row_tile = tl.sum((ends <= at).to(tl.int32), 0)
        seq, seq_row = row_tile % batch, row_tile // batch * BLOCK_M
        start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
        q_len = tl.load(cu_q + seq + 1) - start
        count = tl.sum(tl.where(indices == row_tile, counts, 0), 0)
        tile = (at - (tl.sum(tl.where(indices == row_tile, ends, 0), 0) - count)).to(tl.int32)
        num_tiles = tl.minimum(count - tile, (range_end - at).to(tl.int32))

        first_row, rows = start.to(tl.int64) * HEADS + seq_row, q_len * HEADS - seq_row
        before = kv_len - q_len  # cached tokens before the first query token
        row, row_pe = load_rows(q, first_row, rows, BLOCK_M)
        visible_end = tl.minimum(kv_len, before + (seq_row + BLOCK_M - 1) // HEADS + 1)
        begin = tile * BLOCK_N
        acc, row_max, row_sum = attend(
            row, row_pe, begin, tl.minimum(begin + num_tiles * BLOCK_N, visible_end),
            before + (seq_row + tl.arange(0, BLOCK_M)) // HEADS, kv_len,
            latent, factor, rotated, block_table + seq.to(tl.int64) * width, scale,
            PAGE_SIZE, BLOCK_N, PACKED, STAGES, BRANCHED,
        )  # fmt: skip
        if num_tiles == count:
            finish(acc, row_max, row_sum, first_row, rows, out, lse)
        else:
            part_row = (2 * program + tl.where(tile == 0, 1, 0)) * BLOCK_M
            in_tile = tl.arange(0, BLOCK_M)
            tl.store(sums + 2 * (part_row + in_tile), row_max)
            tl.store(sums + 2 * (part_row + in_tile) + 1, row_sum)
            dims = tl.arange(0, LATENT)[None, :]
            tl.store(partials + part_row * LATENT + in_tile[:, None] * LATENT + dims, acc)
            if LAST_MERGES:
                tl.debug_barrier()  # all threads store partial results before one thread counts
                tiles_begin = at - tile
                first_program = program_of(tiles_begin, total_tiles, num_ranges)
                last_program = program_of(tiles_begin + count - 1, total_tiles, num_ranges)
                arrived = tl.atomic_add(arrivals + row_tile, 1, sem="acq_rel")
                if arrived == last_program - first_program:
                    tl.store(arrivals + row_tile, 0)
                    merge(
                        partials, sums, first_program, last_program, first_row, rows, out, lse,
                        BLOCK_M, BLOCK_D,
                    )  # fmt: skip
        tl.debug_barrier()  # all threads are done with shared memory before it is used again
        at += num_tiles


@triton.jit
def combine(
    kv_lens, cu_q, out, lse, partials, sums, batch,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a row tile a program: merge what `split` has left in partial results.

    The arrays and constants are those of `split`.
    """
    PARTS: tl.constexpr = 16
    row_tile, from_row = tl.program_id(0), tl.program_id(1) * ROWS
    seq, seq_row = row_tile % batch, row_tile // batch * BLOCK_M
    start = tl.load(cu_q + seq)
    rows = (tl.load(cu_q + seq + 1) - start) * HEADS - seq_row
    if from_row < rows:
        indices, counts, ends = count_tiles(
            batch, cu_q, kv_lens, HEADS, BLOCK_M, BLOCK_N, ROW_TILES, PADDED_TILES
        )  # fmt: skip
        total_tiles = tl.sum(counts, 0).to(tl.int64)
        num_ranges = tl.minimum(total_tiles, NUM_PROGRAMS)
        end = tl.sum(tl.where(indices == row_tile, ends, 0), 0)
        begin = end - tl.sum(tl.where(indices == row_tile, counts, 0), 0)
        first_program = program_of(begin, total_tiles, num_ranges)
        last_program = program_of(end - 1, total_tiles, num_ranges)
        if first_program < last_program:
            first_row = start.to(tl.int64) * HEADS + seq_row
            for row in range(from_row, tl.minimum(from_row + ROWS, rows)):
                merge_row(
                    partials, sums, first_program, last_program, row, first_row + row, out, lse,
                    BLOCK_M, PARTS,
                )  # fmt: skip
