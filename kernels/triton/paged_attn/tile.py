"""Attention of a tile of rows over cached tokens, with an online softmax, as FlashAttention-2 does.

A row is a query token and one of the GROUP heads that share a key-value head: row r of a tile is
token r // GROUP. Scores are in units of log2, so that exp2 serves.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def load_rows(q, row, q_len, start, head, HEADS, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of q, zero beyond the sequence's; `start` is its first token among all of q."""
    token, dims = start + row // GROUP, tl.arange(0, HEAD_DIM)
    at = (token.to(tl.int64) * HEADS + head * GROUP + row % GROUP) * HEAD_DIM
    return tl.load(q + at[:, None] + dims[None, :], mask=(row < q_len * GROUP)[:, None], other=0.0)


@triton.jit
def slots_of(tokens, inside, table, PAGE_SIZE: tl.constexpr):
    """Where tokens of a sequence lie in the cache; `table` is the sequence's row."""
    page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0)
    return page.to(tl.int64) * PAGE_SIZE + tokens % PAGE_SIZE, page


@triton.jit
def capped(z, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(z / softcap), of scores in units of log2."""
    if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        z = softcap / LN2 * (1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 / softcap))))
    return z


@triton.jit
def attend(
    rows, acc, most, total, begin, end, last, head, kv_len,
    k_cache, v_cache, table, k_scale, v_scale, window, scale, softcap,
    KV_HEADS, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    PAGE_SCALES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end of a sequence added to (acc, most, total); row r sees up to last[r]."""
    dims = tl.arange(0, HEAD_DIM)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        inside = tokens < kv_len
        slot, page = slots_of(tokens, inside, table, PAGE_SIZE)
        at = (slot * KV_HEADS + head) * HEAD_DIM
        k = tl.load(k_cache + at[None, :] + dims[:, None], mask=inside[None, :], other=0.0)
        z = tl.dot(rows, k.to(rows.dtype)) * scale
        if HAS_SCALES:
            row = page * KV_HEADS + head if PAGE_SCALES else page * 0 + head
            z *= tl.load(k_scale + row, mask=inside, other=0.0)[None, :]
        z = capped(z, softcap, SOFTCAP)
        seen = (tokens[None, :] <= last[:, None]) & inside[None, :]
        if WINDOW:
            seen &= tokens[None, :] > last[:, None] - window
        z = tl.where(seen, z, LOWEST)
        highest = tl.maximum(most, tl.max(z, 1))
        p = tl.where(seen, tl.exp2(z - highest[:, None]), 0.0)
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.sum(p, 1)
        most = highest
        if HAS_SCALES:
            p *= tl.load(v_scale + row, mask=inside, other=0.0)[None, :]
        v = tl.load(v_cache + at[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(p.to(rows.dtype), v.to(rows.dtype), acc * shrink[:, None])
    return acc, most, total


@triton.jit
def finish(
    acc, most, total, row, q_len, start, head, sinks, out, lse,
    HEADS, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the softmax's denominator and store; a row that saw nothing is zero."""
    inside = row < q_len * GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + row % GROUP, mask=inside, other=0.0) / LN2
        highest = tl.maximum(most, sink)
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.exp2(sink - highest)
        acc = acc * shrink[:, None]
        most = highest
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    at = (start + row // GROUP).to(tl.int64) * HEADS + head * GROUP + row % GROUP
    dims = tl.arange(0, HEAD_DIM)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result, mask=inside[:, None])
    value = tl.where(seen, (most + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse + at, value, mask=inside)
