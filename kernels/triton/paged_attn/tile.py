"""Attention of a tile of rows over cached tokens, with an online softmax, as in FlashAttention-2.

A row is a query token and one of the GROUP query heads that share a key-value head: row r of a
sequence is token r // GROUP. `last` (BLOCK_M,) is the position of each row's token, the last key
that is visible to the row.

With TMA the caches are descriptors over (pages * PAGE_SIZE, KV_HEADS * HEAD_DIM), half as many
columns for NVFP4, and a load has BLOCK_N tokens of one head, which lie within a page. Without TMA
they are pointers.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.softmax import LN2, MIN_SCORE, finish_softmax
from kernelcat.kernels.triton.paged_attn.nvfp4 import GROWTH, decode


@triton.jit
def load_rows(q, row, q_len, start, head, HEADS, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows `row` (BLOCK_M,) of a sequence -> (BLOCK_M, HEAD_DIM) of q, zero past the last row.

    start: the sequence's first token in q; head: the key-value head
    """
    token, dims = start + row // GROUP, tl.arange(0, HEAD_DIM)
    at = (token.to(tl.int64) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM
    return tl.load(q + at[:, None] + dims[None, :], mask=(row < q_len * GROUP)[:, None], other=0.0)


@triton.jit
def find_slots(tokens, inside, table, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr = True):
    """Slots and pages (BLOCK_N,) of tokens of a sequence, whose pages are at `table`.

    Where MASKED, the table is not read for tokens that are not `inside` (BLOCK_N,).
    """
    if MASKED:
        page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0)
    else:
        page = tl.load(table + tokens // PAGE_SIZE)
    return page.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE, page


@triton.jit
def cap(z, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(z / softcap) of natural scores z, which come and go multiplied by log2(e)."""
    if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        z = softcap / LN2 * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 / softcap))))
    return z


@triton.jit
def load_heads(array, slot, inside, head, KV_HEADS, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Rows (BLOCK_N, SIZE) at the slots (BLOCK_N,) of an array (slots, KV_HEADS, SIZE).

    Where MASKED, rows that are not `inside` (BLOCK_N,) are zero: the array may hold NaN there.
    """
    at = ((slot * KV_HEADS + head) * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    mask = inside[:, None] if MASKED else None
    return tl.load(array + at, mask=mask, other=0.0 if MASKED else None)


@triton.jit
def load_tile(
    cache, block_scale, slot, inside, head, KV_HEADS, HEAD_DIM: tl.constexpr, NVFP4: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys or values (BLOCK_N, HEAD_DIM) of a cache in dtype; NVFP4 values are divided by GROWTH.

    `slot` is (BLOCK_N,), or with TMA the first of BLOCK_N slots. `inside` and MASKED are those of
    `load_heads`.
    """
    ROW: tl.constexpr = HEAD_DIM // 2 if NVFP4 else HEAD_DIM
    if TMA:
        tile = cache.load([slot, head * ROW])
        if MASKED:
            tile = tl.where(inside[:, None], tile, 0)
    else:
        tile = load_heads(cache, slot, inside, head, KV_HEADS, ROW, MASKED)
    if NVFP4:
        if TMA:
            slot = slot.to(tl.int64) + tl.arange(0, tile.shape[0])
        scales = load_heads(block_scale, slot, inside, head, KV_HEADS, HEAD_DIM // 16, MASKED)
        tile = decode(tile, scales, dtype)
    else:
        tile = tile.to(dtype)
    return tile


@triton.jit
def attend_part(
    rows, acc, row_max, row_sum, begin, end, last, head, kv_len,
    k_cache, v_cache, table, k_scale, v_scale, k_block_scale, v_block_scale,
    window, scale, softcap, KV_HEADS, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add tokens [begin, end) of a sequence to acc (BLOCK_M, HEAD_DIM), row_max and row_sum.

    Unless MASKED, all of these tokens are visible to every row, and their number is a multiple of
    BLOCK_N.
    """
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        inside = tokens < kv_len
        if TMA:
            page = tl.load(table + first // PAGE_SIZE)
            slot = page * PAGE_SIZE + first % PAGE_SIZE
        else:
            slot, page = find_slots(tokens, inside, table, PAGE_SIZE, MASKED)
        k = load_tile(
            k_cache, k_block_scale, slot, inside, head,
            KV_HEADS, HEAD_DIM, NVFP4, MASKED, TMA, rows.dtype,
        )  # fmt: skip
        z = tl.dot(rows, k.T)
        if HAS_SCALES:
            scale_place = page * KV_HEADS + head if PAGE_SCALES else page * 0 + head
            key_scale = tl.load(k_scale + scale_place)
            z *= key_scale if TMA else key_scale[None, :]
        if SOFTCAP:
            z = cap(z * scale, softcap, SOFTCAP) / scale
        if MASKED:
            visible = (tokens[None, :] <= last[:, None]) & inside[None, :]
            if WINDOW:
                visible &= tokens[None, :] > last[:, None] - window
            z = tl.where(visible, z, MIN_SCORE)
        new_max = tl.maximum(row_max, tl.maximum(tl.max(z, 1) * scale, MIN_SCORE))
        p = tl.exp2(z * scale - new_max[:, None])
        if MASKED:
            p = tl.where(visible, p, 0.0)
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        if HAS_SCALES:
            value_scale = tl.load(v_scale + scale_place)
            p *= value_scale if TMA else value_scale[None, :]
        v = load_tile(
            v_cache, v_block_scale, slot, inside, head,
            KV_HEADS, HEAD_DIM, NVFP4, MASKED, TMA, rows.dtype,
        )  # fmt: skip
        acc = tl.dot(p.to(rows.dtype), v, acc * rescale[:, None])
    return acc, row_max, row_sum


@triton.jit
def attend(
    rows, begin, end, masked_begin, last, head, kv_len,
    k_cache, v_cache, table, k_scale, v_scale, k_block_scale, v_block_scale,
    window, scale, softcap, KV_HEADS, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Accumulator (BLOCK_M, HEAD_DIM), row_max and row_sum (BLOCK_M,) of tokens [begin, end).

    Tokens before `masked_begin` are visible to every row: a loop without masks has them.
    """
    BLOCK_M: tl.constexpr = rows.shape[0]
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    row_max, row_sum = tl.full((BLOCK_M,), MIN_SCORE, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    middle = begin
    if NVFP4:
        scale *= GROWTH
    if not WINDOW:
        middle = tl.minimum(tl.maximum(masked_begin // BLOCK_N * BLOCK_N, begin), end)
        acc, row_max, row_sum = attend_part(
            rows, acc, row_max, row_sum, begin, middle, last, head, kv_len, k_cache, v_cache, table,
            k_scale, v_scale, k_block_scale, v_block_scale, window, scale, softcap, KV_HEADS,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP, HAS_SCALES, PAGE_SCALES, NVFP4, STAGES,
            TMA, False,
        )  # fmt: skip
    acc, row_max, row_sum = attend_part(
        rows, acc, row_max, row_sum, middle, end, last, head, kv_len, k_cache, v_cache, table,
        k_scale, v_scale, k_block_scale, v_block_scale, window, scale, softcap, KV_HEADS,
        HEAD_DIM, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP, HAS_SCALES, PAGE_SCALES, NVFP4, STAGES,
        TMA, True,
    )  # fmt: skip
    if NVFP4:
        acc *= GROWTH
    return acc, row_max, row_sum


@triton.jit
def add_sink(row_max, row_sum, sink):
    """Add the sink, which is a logit without a value, to the softmax of rows.

    Returns row_max, row_sum, and the factor by which accumulators shrink.
    """
    sink = sink / LN2
    new_max = tl.maximum(row_max, sink)
    rescale = tl.exp2(row_max - new_max)
    return new_max, row_sum * rescale + tl.exp2(sink - new_max), rescale


@triton.jit
def finish(
    acc, row_max, row_sum, row, q_len, start, head, sinks, out, lse,
    HEADS, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide acc by the softmax's denominator and store; rows without visible keys are zero."""
    inside = row < q_len * GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + row % GROUP, mask=inside, other=0.0)
        row_max, row_sum, rescale = add_sink(row_max, row_sum, sink)
        acc *= rescale[:, None]
    row_sum, row_lse = finish_softmax(row_max, row_sum)
    at = (start + row // GROUP).to(tl.int64) * HEADS + head * GROUP + row % GROUP
    dims = tl.arange(0, HEAD_DIM)
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result, mask=inside[:, None])
    tl.store(lse + at, row_lse, mask=inside)
