"""Equal shares: every program takes as many tiles of cached tokens as any other.

A tile of rows of a sequence asks for that sequence's tiles of tokens. The tiles of all of these
stand in one row, which is cut into a share for each program, on the device and at each launch: a
captured graph is right after lengths and tables have changed. A share has at most two tiles of rows
of which it holds a piece only. Those are added up by the last program to arrive, as in
`paged_attn`, or by a launch of their own, which has programs enough where pieces are many. Tiles of
rows stand outermost so that programs read the same tokens for different heads at about the same
time, which then come out of L2.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.flashmla.tile import LATENT, LOWEST, attend, ended, finish, load_rows
from kernelcat.kernels.triton.paged_attn.split import program_of


@triton.jit
def askers(
    batch, cu_q, kv_lens, HEADS, BLOCK_M, BLOCK_N, ROW_TILES: tl.constexpr, ASKING: tl.constexpr
):
    """Of each tile of rows, those of all sequences side by side: its number, how many tiles of
    tokens it sees (one where it sees nothing, none where it has no row), and where they end."""
    asker = tl.arange(0, ASKING)
    seq, tile_row, inside = asker % batch, asker // batch * BLOCK_M, asker < ROW_TILES * batch
    start = tl.load(cu_q + seq, mask=inside, other=0)
    q_len = tl.load(cu_q + seq + 1, mask=inside, other=0) - start
    kv_len = tl.load(kv_lens + seq, mask=inside, other=0)
    end = tl.minimum(kv_len, kv_len - q_len + (tile_row + BLOCK_M - 1) // HEADS + 1)
    counts = tl.where(tile_row < q_len * HEADS, tl.maximum(tl.cdiv(end, BLOCK_N), 1), 0)
    return asker, counts, tl.cumsum(counts, 0)


@triton.jit
def piece_of(program, first):
    """A tile of rows begins in the second piece of its first program, and goes on in first ones."""
    return (2 * program + tl.where(program == first, 1, 0)).to(tl.int64)


@triton.jit
def merge(
    partials, sums, first, last, first_row, rows, out, lse,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the sum of pieces, those of programs first .. last, BLOCK_D columns at once."""
    row, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :]
    most, total = tl.full((BLOCK_M,), LOWEST, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for program in range(first, last + 1):
        at = sums + 2 * (piece_of(program, first) * BLOCK_M + row)
        its_most = tl.load(at, cache_modifier=".cg")
        its_total = tl.load(at + 1, cache_modifier=".cg")
        highest = tl.maximum(most, its_most)
        total = total * tl.exp2(most - highest) + its_total * tl.exp2(its_most - highest)
        most = highest
    total, log_sum = ended(most, total)
    tl.store(lse + first_row + row, log_sum, mask=row < rows)
    for first_dim in range(0, LATENT, BLOCK_D):
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for program in range(first, last + 1):
            slot = piece_of(program, first) * BLOCK_M
            weight = tl.exp2(tl.load(sums + 2 * (slot + row), cache_modifier=".cg") - most)
            piece = partials + slot * LATENT + first_dim + row[:, None] * LATENT + dims
            acc += tl.load(piece, cache_modifier=".cg") * weight[:, None]
        at = out + first_row * LATENT + first_dim + row[:, None] * LATENT + dims
        result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
        tl.store(at, result, mask=(row < rows)[:, None])


@triton.jit
def merge_row(
    partials, sums, first, last, row, target, out, lse,
    BLOCK_M: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """As `merge`, of the tile's row `row`, `target` among all, and PIECES pieces at once."""
    lane, dims = tl.arange(0, PIECES), tl.arange(0, LATENT)
    most, total = -1.0e30, 0.0
    for program in range(first, last + 1, PIECES):
        inside = program + lane <= last
        at = sums + 2 * (piece_of(program + lane, first) * BLOCK_M + row)
        its_most = tl.load(at, mask=inside, other=LOWEST)
        its_total = tl.load(at + 1, mask=inside, other=0.0)
        highest = tl.maximum(most, tl.max(its_most, 0))
        sum_here = tl.sum(its_total * tl.exp2(its_most - highest), 0)
        total = total * tl.exp2(most - highest) + sum_here
        most = highest
    acc = tl.zeros((PIECES, LATENT), tl.float32)
    for program in range(first, last + 1, PIECES):
        inside = program + lane <= last
        slot = piece_of(program + lane, first) * BLOCK_M + row
        weight = tl.exp2(tl.load(sums + 2 * slot, mask=inside, other=LOWEST) - most)
        piece = partials + slot[:, None] * LATENT + dims[None, :]
        acc += tl.load(piece, mask=inside[:, None], other=0.0) * weight[:, None]
    total, log_sum = ended(most, total)
    result = tl.sum(acc, 0) * (1.0 / total)
    tl.store(out + target * LATENT + dims, result.to(out.dtype.element_ty))
    tl.store(lse + target, log_sum)


@triton.jit
def split(
    q, latent, factor, rotated, block_table, kv_lens, cu_q, out, lse, partials, sums, arrivals,
    batch, width, scale,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, APART: tl.constexpr,
    ROW_TILES: tl.constexpr, ASKING: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    LAST_MERGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partials (2 * programs, BLOCK_M, 512) and sums (.., BLOCK_M, 2: most, total) float32,
    arrivals (ROW_TILES * batch) int32, zero before and after. ASKING >= ROW_TILES * batch is a
    power of two."""
    program = tl.program_id(0).to(tl.int64)
    number, counts, ends = askers(
        batch, cu_q, kv_lens, HEADS, BLOCK_M, BLOCK_N, ROW_TILES, ASKING
    )  # fmt: skip
    total_tiles = tl.sum(counts, 0).to(tl.int64)
    programs = tl.minimum(total_tiles, NUM_PROGRAMS)  # none of which has an empty share
    at, share_end = total_tiles, total_tiles
    if program < programs:
        at = total_tiles * program // programs
        share_end = total_tiles * (program + 1) // programs
    while at < share_end:
        asker = tl.sum((ends <= at).to(tl.int32), 0)
        seq, tile_row = asker % batch, asker // batch * BLOCK_M
        start, kv_len = tl.load(cu_q + seq), tl.load(kv_lens + seq)
        q_len = tl.load(cu_q + seq + 1) - start
        count = tl.sum(tl.where(number == asker, counts, 0), 0)
        tile = (at - (tl.sum(tl.where(number == asker, ends, 0), 0) - count)).to(tl.int32)
        num_tiles = tl.minimum(count - tile, (share_end - at).to(tl.int32))

        first_row, rows = start.to(tl.int64) * HEADS + tile_row, q_len * HEADS - tile_row
        before = kv_len - q_len  # tokens that come before all queries
        row, row_pe = load_rows(q, first_row, rows, BLOCK_M)
        seen_end = tl.minimum(kv_len, before + (tile_row + BLOCK_M - 1) // HEADS + 1)
        begin = tile * BLOCK_N
        acc, most, total = attend(
            row, row_pe, begin, tl.minimum(begin + num_tiles * BLOCK_N, seen_end),
            before + (tile_row + tl.arange(0, BLOCK_M)) // HEADS, kv_len,
            latent, factor, rotated, block_table + seq.to(tl.int64) * width, scale,
            PAGE_SIZE, BLOCK_N, PACKED, STAGES, APART,
        )  # fmt: skip
        if num_tiles == count:
            finish(acc, most, total, first_row, rows, out, lse)
        else:
            slot = (2 * program + tl.where(tile == 0, 1, 0)) * BLOCK_M
            piece = tl.arange(0, BLOCK_M)
            tl.store(sums + 2 * (slot + piece), most)
            tl.store(sums + 2 * (slot + piece) + 1, total)
            dims = tl.arange(0, LATENT)[None, :]
            tl.store(partials + slot * LATENT + piece[:, None] * LATENT + dims, acc)
            if LAST_MERGES:
                tl.debug_barrier()  # every thread's pieces before the one thread that counts
                tiles_begin = at - tile
                first_program = program_of(tiles_begin, total_tiles, programs)
                last_program = program_of(tiles_begin + count - 1, total_tiles, programs)
                arrived = tl.atomic_add(arrivals + asker, 1, sem="acq_rel")
                if arrived == last_program - first_program:
                    tl.store(arrivals + asker, 0)
                    merge(
                        partials, sums, first_program, last_program, first_row, rows, out, lse,
                        BLOCK_M, BLOCK_D,
                    )  # fmt: skip
        tl.debug_barrier()  # shared memory is the next tile's from here on
        at += num_tiles


@triton.jit
def combine(
    kv_lens, cu_q, out, lse, partials, sums, batch,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_TILES: tl.constexpr,
    ASKING: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile a program, where `split` has left it in pieces; arrays are its own."""
    PIECES: tl.constexpr = 16
    asker, from_row = tl.program_id(0), tl.program_id(1) * ROWS
    seq, tile_row = asker % batch, asker // batch * BLOCK_M
    start = tl.load(cu_q + seq)
    rows = (tl.load(cu_q + seq + 1) - start) * HEADS - tile_row
    if from_row < rows:
        number, counts, ends = askers(
            batch, cu_q, kv_lens, HEADS, BLOCK_M, BLOCK_N, ROW_TILES, ASKING
        )  # fmt: skip
        total_tiles = tl.sum(counts, 0).to(tl.int64)
        programs = tl.minimum(total_tiles, NUM_PROGRAMS)
        end = tl.sum(tl.where(number == asker, ends, 0), 0)
        begin = end - tl.sum(tl.where(number == asker, counts, 0), 0)
        first_program = program_of(begin, total_tiles, programs)
        last_program = program_of(end - 1, total_tiles, programs)
        if first_program < last_program:
            first_row = start.to(tl.int64) * HEADS + tile_row
            for row in range(from_row, tl.minimum(from_row + ROWS, rows)):
                merge_row(
                    partials, sums, first_program, last_program, row, first_row + row, out, lse,
                    BLOCK_M, PIECES,
                )  # fmt: skip
