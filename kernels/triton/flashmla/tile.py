"""Latent attention of a tile of rows over cached tokens, with an online softmax.

A row is a query token and one of its heads: row r of a sequence is token r // HEADS. A token of the
cache is loaded in two parts, its latent (512 elements, key and value) and what is rotated of its
key (64). The three pointers to the cache are to the same memory: `latent` and `rotated` have the
cache's type, or where PACKED those of a row of 656 bytes, and `factor` is that of its scales.
Scores are in units of log2, so that exp2 serves.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.paged_attn.tile import LOWEST, ended

LATENT = tl.constexpr(512)
ROPE = tl.constexpr(64)
ROW = tl.constexpr(576)
PACKED_ROW = tl.constexpr(656)
SCALED = tl.constexpr(128)
"""Latent elements that share a scale."""


@triton.jit
def load_rows(q, first_row, rows, BLOCK_M: tl.constexpr):
    """Both parts of BLOCK_M rows of q from `first_row` on, zero from the `rows`-th on."""
    row = tl.arange(0, BLOCK_M)[:, None]
    base = q + first_row * ROW
    latent = tl.load(base + row * ROW + tl.arange(0, LATENT)[None, :], mask=row < rows, other=0.0)
    pe_dims = LATENT + tl.arange(0, ROPE)[None, :]
    return latent, tl.load(base + row * ROW + pe_dims, mask=row < rows, other=0.0)


@triton.jit
def slots_of(first, table, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where BLOCK_N tokens from `first` on, a multiple of BLOCK_N, lie in the cache.

    A slot, and the distances of theirs to it: few of its bits are in registers of every thread
    where a page has them all. `table` is the sequence's row of the block table. Entries beyond the
    sequence are not read.
    """
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(table + first // PAGE_SIZE).to(tl.int64)
        return page * PAGE_SIZE + first % PAGE_SIZE, tl.arange(0, BLOCK_N)
    else:
        tokens = first + tl.arange(0, BLOCK_N)
        page = tl.load(table + tokens // PAGE_SIZE, mask=tokens < kv_len, other=0)
        return 0, page.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE


@triton.jit
def load_part(array, slot, rows, inside, STRIDE: tl.constexpr, FIRST: tl.constexpr,
              SIZE: tl.constexpr):  # fmt: skip
    """(BLOCK_N, SIZE) from element FIRST on of rows STRIDE elements apart, `slot` the first.

    Rows that are not `inside` are zero: they may hold NaN.
    """
    at = (rows * STRIDE)[:, None] + tl.arange(0, SIZE)[None, :]
    return tl.load(array + (slot * STRIDE + FIRST) + at, mask=inside[:, None], other=0.0)


@triton.jit
def load_tokens(
    latent, factor, rotated, slot, rows, inside, PACKED: tl.constexpr, dtype: tl.constexpr
):
    """Latents (BLOCK_N, 512) and rotated parts (BLOCK_N, 64) of tokens, as `slots_of` has them.

    A float8 value times a power of two has no more bits than bfloat16 holds.
    """
    BLOCK_N: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = LATENT // SCALED
    if PACKED:
        codes = load_part(latent, slot, rows, inside, PACKED_ROW, 0, LATENT)
        factors = load_part(factor, slot, rows, inside, PACKED_ROW // 4, LATENT // 4, GROUPS)
        factors = tl.broadcast_to(factors[:, :, None], (BLOCK_N, GROUPS, SCALED))
        c = codes.to(tl.float32) * factors.reshape(BLOCK_N, LATENT)
        first_pe: tl.constexpr = (LATENT + 4 * GROUPS) // 2
        pe = load_part(rotated, slot, rows, inside, PACKED_ROW // 2, first_pe, ROPE)
    else:
        c = load_part(latent, slot, rows, inside, ROW, 0, LATENT)
        pe = load_part(rotated, slot, rows, inside, ROW, LATENT, ROPE)
    return c.to(dtype), pe.to(dtype)


@triton.jit
def weights(z, seen, most, total, dtype: tl.constexpr):
    """Of scores z: weights in dtype, what earlier sums shrink to, the new maximum and sum."""
    z = tl.where(seen, z, float("-inf"))
    highest = tl.maximum(most, tl.max(z, 1))  # most is LOWEST or more: no infinities cancel
    p = tl.exp2(z - highest[:, None])
    shrink = tl.exp2(most - highest)
    return p.to(dtype), shrink, highest, total * shrink + tl.sum(p, 1)


@triton.jit
def attend(
    q, q_pe, begin, end, last, kv_len, latent, factor, rotated, table, scale,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """(acc, most, total) of tokens begin .. end of a sequence; row r sees up to last[r].

    One loop with masks: with another one without them, registers spill. APART has the products of
    scores in branches, which are always taken: else Triton sees that the values' product takes what
    they make, and has every warpgroup make all of it.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    most, total = tl.full((BLOCK_M,), LOWEST, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        inside = tokens < kv_len
        slot, rows = slots_of(first, table, kv_len, PAGE_SIZE, BLOCK_N)
        c, pe = load_tokens(latent, factor, rotated, slot, rows, inside, PACKED, q.dtype)
        seen = (tokens[None, :] <= last[:, None]) & inside[None, :]
        if APART:
            if first < end:  # noqa: SIM108
                z = tl.dot(q_pe, pe.T)
            else:
                z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if first < kv_len:
                z = tl.dot(q, c.T, z) * scale
                p, shrink, most, total = weights(z, seen, most, total, q.dtype)
            else:
                p = tl.broadcast_to(total[:, None], (BLOCK_M, BLOCK_N)).to(q.dtype)
                shrink = total
        else:
            z = tl.dot(q, c.T, tl.dot(q_pe, pe.T)) * scale
            p, shrink, most, total = weights(z, seen, most, total, q.dtype)
        acc = tl.dot(p, c, acc * shrink[:, None])
    return acc, most, total


@triton.jit
def finish(acc, most, total, first_row, rows, out, lse):
    """Divide by the softmax's denominator and store; a row that saw nothing is zero."""
    total, log_sum = ended(most, total)
    row = tl.arange(0, acc.shape[0])
    at = out + first_row * LATENT + row[:, None] * LATENT + tl.arange(0, LATENT)[None, :]
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(at, result, mask=(row < rows)[:, None])
    tl.store(lse + first_row + row, log_sum, mask=row < rows)
