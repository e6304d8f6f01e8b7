"""Latent attention of a tile of rows over cached tokens, with an online softmax.

A row is a query token and one of its heads: row r of a sequence is token r // HEADS. A cached token
is loaded in two parts: its latent (512 elements, both key and value) and the rotated part of its
key (64 elements). `latent`, `factor` and `rotated` are the pointers to the cache
(common/device/mla_row.py).
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.mla_row import (
    FACTOR_OFFSET,
    FACTOR_STRIDE,
    LATENT,
    NUM_GROUPS,
    PACKED_ROTATED_OFFSET,
    PACKED_ROTATED_STRIDE,
    PACKED_ROW,
    ROPE,
    ROW,
    SCALE_GROUP,
)
from kernelcat.kernels.triton.common.device.softmax import MIN_SCORE, finish_softmax


@triton.jit
def load_rows(q, first_row, rows, BLOCK_M: tl.constexpr):
    """Latent and rotated parts, (BLOCK_M, 512) and (BLOCK_M, 64), of q from row `first_row` on.

    Only the first `rows` rows belong to the sequence; the others are zero.
    """
    row = tl.arange(0, BLOCK_M)[:, None]
    base = q + first_row * ROW
    latent = tl.load(base + row * ROW + tl.arange(0, LATENT)[None, :], mask=row < rows, other=0.0)
    pe_dims = LATENT + tl.arange(0, ROPE)[None, :]
    return latent, tl.load(base + row * ROW + pe_dims, mask=row < rows, other=0.0)


@triton.jit
def find_slots(first, table, kv_len, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of BLOCK_N tokens from `first` on: one base slot, and offsets (BLOCK_N,) to the base.

    `first` is a multiple of BLOCK_N, so that one page has all of the tokens unless pages are
    smaller. Then the base has the page in 64 bits, and the offsets, which every thread holds for
    its rows, are small. `table` is the sequence's row of the block table; entries past the sequence
    are not read.
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
    """Elements FIRST to FIRST + SIZE of the rows at slot + rows, (BLOCK_N, SIZE).

    STRIDE is the distance of rows in elements. Rows that are not `inside` (BLOCK_N,) are zero: the
    cache may hold NaN there.
    """
    offsets = (rows * STRIDE)[:, None] + tl.arange(0, SIZE)[None, :]
    return tl.load(array + (slot * STRIDE + FIRST) + offsets, mask=inside[:, None], other=0.0)


@triton.jit
def load_tokens(
    latent, factor, rotated, slot, rows, inside, PACKED: tl.constexpr, dtype: tl.constexpr
):
    """Latents (BLOCK_N, 512) and rotated parts (BLOCK_N, 64) of tokens; slot, rows: `find_slots`.

    Packed latents are exact in bfloat16: a scale is a power of two, so that the product has no more
    bits than the float8 value.
    """
    BLOCK_N: tl.constexpr = rows.shape[0]
    if PACKED:
        codes = load_part(latent, slot, rows, inside, PACKED_ROW, 0, LATENT)
        factors = load_part(factor, slot, rows, inside, FACTOR_STRIDE, FACTOR_OFFSET, NUM_GROUPS)
        factors = tl.broadcast_to(factors[:, :, None], (BLOCK_N, NUM_GROUPS, SCALE_GROUP))
        c = codes.to(tl.float32) * factors.reshape(BLOCK_N, LATENT)
        pe = load_part(
            rotated, slot, rows, inside, PACKED_ROTATED_STRIDE, PACKED_ROTATED_OFFSET, ROPE
        )
    else:
        c = load_part(latent, slot, rows, inside, ROW, 0, LATENT)
        pe = load_part(rotated, slot, rows, inside, ROW, LATENT, ROPE)
    return c.to(dtype), pe.to(dtype)


@triton.jit
def update_softmax(z, visible, row_max, row_sum, dtype: tl.constexpr):
    """Add scores z (BLOCK_M, BLOCK_N), in units of log2, to the softmax of rows.

    Returns the weights in dtype, the factor of the accumulator, row_max and row_sum.
    """
    z = tl.where(visible, z, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(z, 1))  # at least MIN_SCORE: finite
    p = tl.exp2(z - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    return p.to(dtype), rescale, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def attend(
    q, q_pe, begin, end, last, kv_len, latent, factor, rotated, table, scale,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
    BRANCHED: tl.constexpr,
):  # fmt: skip
    """Accumulator (BLOCK_M, 512), row_max and row_sum (BLOCK_M,) of tokens [begin, end).

    `last` (BLOCK_M,) is the position of the last token that is visible to each row. There is one
    loop, with masks: with a second loop for tokens that are visible to all rows, registers spill.

    BRANCHED puts the products of the scores into branches that are always taken. Without the
    branches Triton's compiler sees that the product with the values takes its operand from these
    products, and makes every warpgroup compute all of the scores.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    row_max, row_sum = tl.full((BLOCK_M,), MIN_SCORE, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        inside = tokens < kv_len
        slot, rows = find_slots(first, table, kv_len, PAGE_SIZE, BLOCK_N)
        c, pe = load_tokens(latent, factor, rotated, slot, rows, inside, PACKED, q.dtype)
        visible = (tokens[None, :] <= last[:, None]) & inside[None, :]
        if BRANCHED:
            if first < end:  # noqa: SIM108
                z = tl.dot(q_pe, pe.T)
            else:
                z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if first < kv_len:
                z = tl.dot(q, c.T, z) * scale
                p, rescale, row_max, row_sum = update_softmax(z, visible, row_max, row_sum, q.dtype)
            else:
                p = tl.broadcast_to(row_sum[:, None], (BLOCK_M, BLOCK_N)).to(q.dtype)
                rescale = row_sum
        else:
            z = tl.dot(q, c.T, tl.dot(q_pe, pe.T)) * scale
            p, rescale, row_max, row_sum = update_softmax(z, visible, row_max, row_sum, q.dtype)
        acc = tl.dot(p, c, acc * rescale[:, None])
    return acc, row_max, row_sum


@triton.jit
def finish(acc, row_max, row_sum, first_row, rows, out, lse):
    """Divide acc by the softmax's denominator and store; rows without visible keys are zero."""
    row_sum, row_lse = finish_softmax(row_max, row_sum)
    row = tl.arange(0, acc.shape[0])
    target = out + first_row * LATENT + row[:, None] * LATENT + tl.arange(0, LATENT)[None, :]
    result = (acc * (1.0 / row_sum)[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=(row < rows)[:, None])
    tl.store(lse + first_row + row, row_lse, mask=row < rows)
