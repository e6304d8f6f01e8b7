"""Attention of a tile of rows over cached tokens, with an online softmax, as FlashAttention-2 does.

A row is a query token and one of the GROUP heads that share a key-value head: row r of a tile is
token r // GROUP. Scores are in units of log2, so that exp2 serves.

k_cache and v_cache are pointers, or with TMA descriptors over (pages * PAGE_SIZE, KV_HEADS *
HEAD_DIM) in blocks of (BLOCK_N, HEAD_DIM), which lie within a page.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.paged_attn.nvfp4 import GROWTH, widened

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def load_rows(q, row, q_len, start, head, HEADS, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of q, zero beyond the sequence's; `start` is its first token among all of q."""
    token, dims = start + row // GROUP, tl.arange(0, HEAD_DIM)
    at = (token.to(tl.int64) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM
    return tl.load(q + at[:, None] + dims[None, :], mask=(row < q_len * GROUP)[:, None], other=0.0)


@triton.jit
def slots_of(tokens, inside, table, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr = True):
    """Where tokens of a sequence lie in the cache, and their pages; `table` is its row."""
    if MASKED:
        page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0)
    else:
        page = tl.load(table + tokens // PAGE_SIZE)
    return page.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE, page


@triton.jit
def capped(z, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(z / softcap), of scores in units of log2."""
    if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        z = softcap / LN2 * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 / softcap))))
    return z


@triton.jit
def load_heads(array, slot, inside, head, KV_HEADS, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """(BLOCK_N, SIZE) of an array (slots, KV_HEADS, SIZE): rows at `slot`.

    Where MASKED, rows that are not `inside` are zero: they may hold NaN.
    """
    at = ((slot * KV_HEADS + head) * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    mask = inside[:, None] if MASKED else None
    return tl.load(array + at, mask=mask, other=0.0 if MASKED else None)


@triton.jit
def load_tile(
    cache, block_scale, slot, inside, head, KV_HEADS, HEAD_DIM: tl.constexpr, NVFP4: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, HEAD_DIM) of a cache, as `load_heads`; with TMA BLOCK_N rows from `slot` on.

    Of NVFP4 it is still to be multiplied by GROWTH.
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
        tile = widened(tile, scales, dtype)
    else:
        tile = tile.to(dtype)
    return tile


@triton.jit
def attend_part(
    rows, acc, most, total, begin, end, last, head, kv_len,
    k_cache, v_cache, table, k_scale, v_scale, k_block_scale, v_block_scale,
    window, scale, softcap, KV_HEADS, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end of a sequence added to (acc, most, total); row r sees up to last[r].

    Unless MASKED every row sees all of them, and they end with a block.
    """
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        inside = tokens < kv_len
        if TMA:
            page = tl.load(table + first // PAGE_SIZE)
            slot = page * PAGE_SIZE + first % PAGE_SIZE
        else:
            slot, page = slots_of(tokens, inside, table, PAGE_SIZE, MASKED)
        k = load_tile(
            k_cache, k_block_scale, slot, inside, head,
            KV_HEADS, HEAD_DIM, NVFP4, MASKED, TMA, rows.dtype,
        )  # fmt: skip
        z = tl.dot(rows, k.T)
        if HAS_SCALES:
            at = page * KV_HEADS + head if PAGE_SCALES else page * 0 + head
            keys = tl.load(k_scale + at)
            z *= keys if TMA else keys[None, :]
        if SOFTCAP:
            z = capped(z * scale, softcap, SOFTCAP) / scale
        if MASKED:
            seen = (tokens[None, :] <= last[:, None]) & inside[None, :]
            if WINDOW:
                seen &= tokens[None, :] > last[:, None] - window
            z = tl.where(seen, z, LOWEST)
        highest = tl.maximum(most, tl.maximum(tl.max(z, 1) * scale, LOWEST))
        p = tl.exp2(z * scale - highest[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.sum(p, 1)
        most = highest
        if HAS_SCALES:
            values = tl.load(v_scale + at)
            p *= values if TMA else values[None, :]
        v = load_tile(
            v_cache, v_block_scale, slot, inside, head,
            KV_HEADS, HEAD_DIM, NVFP4, MASKED, TMA, rows.dtype,
        )  # fmt: skip
        acc = tl.dot(p.to(rows.dtype), v, acc * shrink[:, None])
    return acc, most, total


@triton.jit
def attend(
    rows, begin, end, clear, last, head, kv_len,
    k_cache, v_cache, table, k_scale, v_scale, k_block_scale, v_block_scale,
    window, scale, softcap, KV_HEADS, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    PAGE_SCALES: tl.constexpr, NVFP4: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(acc, most, total) of tokens begin .. end; every row sees those before `clear`."""
    BLOCK_M: tl.constexpr = rows.shape[0]
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    most, total = tl.full((BLOCK_M,), LOWEST, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    middle = begin
    if NVFP4:
        scale *= GROWTH
    if not WINDOW:
        middle = tl.minimum(tl.maximum(clear // BLOCK_N * BLOCK_N, begin), end)
        acc, most, total = attend_part(
            rows, acc, most, total, begin, middle, last, head, kv_len, k_cache, v_cache, table,
            k_scale, v_scale, k_block_scale, v_block_scale, window, scale, softcap, KV_HEADS,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP, HAS_SCALES, PAGE_SCALES, NVFP4, STAGES,
            TMA, False,
        )  # fmt: skip
    acc, most, total = attend_part(
        rows, acc, most, total, middle, end, last, head, kv_len, k_cache, v_cache, table,
        k_scale, v_scale, k_block_scale, v_block_scale, window, scale, softcap, KV_HEADS,
        HEAD_DIM, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP, HAS_SCALES, PAGE_SCALES, NVFP4, STAGES,
        TMA, True,
    )  # fmt: skip
    if NVFP4:
        acc *= GROWTH
    return acc, most, total


@triton.jit
def with_sink(most, total, sink):
    """A logit more, without a value: maximum, sum, and what sums of values are multiplied by."""
    sink = sink / LN2
    highest = tl.maximum(most, sink)
    shrink = tl.exp2(most - highest)
    return highest, total * shrink + tl.exp2(sink - highest), shrink


@triton.jit
def ended(most, total):
    """The softmax's denominator, 1 of a row that saw nothing, and the log of it."""
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    return total, tl.where(seen, (most + tl.log2(total)) * LN2, float("-inf"))


@triton.jit
def finish(
    acc, most, total, row, q_len, start, head, sinks, out, lse,
    HEADS, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the softmax's denominator and store; a row that saw nothing is zero."""
    inside = row < q_len * GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + row % GROUP, mask=inside, other=0.0)
        most, total, shrink = with_sink(most, total, sink)
        acc *= shrink[:, None]
    total, log_sum = ended(most, total)
    at = (start + row // GROUP).to(tl.int64) * HEADS + head * GROUP + row % GROUP
    dims = tl.arange(0, HEAD_DIM)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result, mask=inside[:, None])
    tl.store(lse + at, log_sum, mask=inside)
