"""Triton kernels of `kv_write`; the arrays are those of the entry."""

import triton
import triton.language as tl


@triton.jit
def sequence_of(token, cu_q, batch, CHUNK: tl.constexpr):
    """The last sequence that begins no later than `token`: as many as those after the first."""
    s = 0
    for first in range(1, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        starts = tl.load(cu_q + others, mask=others < batch, other=2147483647)
        s += tl.sum((starts <= token).to(tl.int32), 0)
    return s


@triton.jit
def position_of(token, s, kv_lens, cu_q):
    """Of a token of sequence `s`."""
    return tl.load(kv_lens + s) - tl.load(cu_q + s + 1) + token


@triton.jit
def slot_of(at, s, block_table, width, PAGE_SIZE: tl.constexpr):
    """The page of position `at` of sequence `s`, and its slot among those of all pages."""
    page = tl.load(block_table + s.to(tl.int64) * width + at // PAGE_SIZE).to(tl.int64)
    return page, page * PAGE_SIZE + at % PAGE_SIZE


@triton.jit
def inverse_of(scale, page, head, kv_heads, inside, HAS_SCALES: tl.constexpr,
               PAGE_SCALES: tl.constexpr):  # fmt: skip
    """What a head's keys or values are multiplied by."""
    inverse = 1.0
    if HAS_SCALES:
        row = page if PAGE_SCALES else 0
        inverse = 1.0 / tl.load(scale + row * kv_heads + head, mask=inside, other=1.0)
    return inverse


@triton.jit
def naive(
    q, k, v, block_table, kv_lens, cu_q, cos_sin, k_scale, v_scale, q_out, k_cache, v_cache,
    batch, heads, kv_heads, width, rotary_dim,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr,
):  # fmt: skip
    """A head of a token's queries, keys or values a program; partners are loaded once more."""
    token, head, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, HEAD_DIM)
    s = sequence_of(token, cu_q, batch, CHUNK)
    at = position_of(token, s, kv_lens, cu_q)
    half = rotary_dim // 2
    turns = dims < rotary_dim
    if INTERLEAVED:
        is_first, partner, pair = dims % 2 == 0, dims ^ 1, dims // 2
    else:
        is_first = dims < half
        partner, pair = tl.where(is_first, dims + half, dims - half), dims % tl.maximum(half, 1)
    angles = cos_sin + at.to(tl.int64) * rotary_dim + pair
    cos = tl.load(angles, mask=turns, other=1.0)
    sin = tl.load(angles + half, mask=turns, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    if head < heads:
        row = (token.to(tl.int64) * heads + head) * HEAD_DIM
        x = tl.load(q + row + dims).to(tl.float32)
        y = tl.load(q + row + partner, mask=turns, other=0.0).to(tl.float32)
        tl.store(q_out + row + dims, x * cos + y * sin)
    else:
        page, slot = slot_of(at, s, block_table, width, PAGE_SIZE)
        kv_head = (head - heads) // 2
        row = (token.to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
        target = (slot * kv_heads + kv_head) * HEAD_DIM + dims
        if (head - heads) % 2 == 0:
            x = tl.load(k + row + dims).to(tl.float32)
            y = tl.load(k + row + partner, mask=turns, other=0.0).to(tl.float32)
            inverse = inverse_of(k_scale, page, kv_head, kv_heads, True, HAS_SCALES, PAGE_SCALES)
            tl.store(k_cache + target, (x * cos + y * sin) * inverse)
        else:
            x = tl.load(v + row + dims).to(tl.float32)
            inverse = inverse_of(v_scale, page, kv_head, kv_heads, True, HAS_SCALES, PAGE_SCALES)
            tl.store(v_cache + target, x * inverse)


@triton.jit
def load_pairs(rows, inside, ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What turns of the rows (BLOCK_H,) that begin at `rows`: first and second of each pair."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIRS)
        mask = inside[:, None] & (dims < ROTARY)[None, :]
        both = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], PAIRS, 2)))
    else:
        dims = tl.arange(0, PAIRS)
        mask = inside[:, None] & (dims < ROTARY // 2)[None, :]
        first = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)
        second = tl.load(rows[:, None] + (ROTARY // 2 + dims)[None, :], mask=mask, other=0.0)
    return first, second


@triton.jit
def store_pairs(
    rows, first, second, inside,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Where `load_pairs` would have them from, rounded to what is there."""
    if INTERLEAVED:
        dims = tl.arange(0, 2 * PAIRS)
        mask = inside[:, None] & (dims < ROTARY)[None, :]
        both = tl.reshape(tl.join(first, second), (rows.shape[0], 2 * PAIRS))
        tl.store(rows[:, None] + dims[None, :], both, mask=mask)
    else:
        dims = tl.arange(0, PAIRS)
        mask = inside[:, None] & (dims < ROTARY // 2)[None, :]
        tl.store(rows[:, None] + dims[None, :], first, mask=mask)
        tl.store(rows[:, None] + (ROTARY // 2 + dims)[None, :], second, mask=mask)


@triton.jit
def vectorized(
    q, k, v, block_table, kv_lens, cu_q, cos_sin, k_scale, v_scale, q_out, k_cache, v_cache,
    batch, heads, kv_heads, width,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of a token a program: of its keys and values, or of its queries.

    Both elements of a pair are in one thread. The rows are asked for before it is known where in
    its sequence the token is.
    """
    token, part = tl.program_id(0), tl.program_id(1)
    kv_parts = tl.cdiv(kv_heads, BLOCK_H)
    is_kv = part < kv_parts
    num_heads = kv_heads if is_kv else heads
    head = (part if is_kv else part - kv_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < num_heads
    row = (token.to(tl.int64) * num_heads + head) * HEAD_DIM
    source = (k if is_kv else q) + row
    if ROTARY > 0:
        x, y = load_pairs(source, inside, ROTARY, PAIRS, INTERLEAVED)
    if REST > 0:
        tail = ROTARY + tl.arange(0, REST)
        tail_inside = inside[:, None] & (tail < HEAD_DIM)[None, :]
        rest = tl.load(source[:, None] + tail[None, :], mask=tail_inside, other=0.0)
    dims = tl.arange(0, HEAD_DIM)
    value_inside = (head < (kv_heads if is_kv else 0))[:, None]
    value = tl.load(v + row[:, None] + dims[None, :], mask=value_inside, other=0.0)

    s = sequence_of(token, cu_q, batch, CHUNK)
    at = position_of(token, s, kv_lens, cu_q)
    if ROTARY > 0:
        pair = tl.arange(0, PAIRS)
        angles = cos_sin + at.to(tl.int64) * ROTARY + pair
        cos = tl.load(angles, mask=pair < ROTARY // 2, other=1.0)[None, :]
        sin = tl.load(angles + ROTARY // 2, mask=pair < ROTARY // 2, other=0.0)[None, :]
        x, y = x.to(tl.float32), y.to(tl.float32)
        x, y = x * cos - y * sin, y * cos + x * sin
    if is_kv:
        page, slot = slot_of(at, s, block_table, width, PAGE_SIZE)
        target = (slot * kv_heads + head) * HEAD_DIM
        inverse = inverse_of(k_scale, page, head, kv_heads, inside, HAS_SCALES, PAGE_SCALES)
        if HAS_SCALES:
            inverse = inverse[:, None]
        if ROTARY > 0:
            store_pairs(
                k_cache + target, x * inverse, y * inverse, inside, ROTARY, PAIRS, INTERLEAVED
            )
        if REST > 0:
            kept = rest.to(tl.float32) * inverse
            tl.store(k_cache + target[:, None] + tail[None, :], kept, mask=tail_inside)
        inverse = inverse_of(v_scale, page, head, kv_heads, inside, HAS_SCALES, PAGE_SCALES)
        if HAS_SCALES:
            inverse = inverse[:, None]
        values = value.to(tl.float32) * inverse
        tl.store(v_cache + target[:, None] + dims[None, :], values, mask=value_inside)
    else:
        if ROTARY > 0:
            store_pairs(q_out + row, x, y, inside, ROTARY, PAIRS, INTERLEAVED)
        if REST > 0:
            tl.store(q_out + row[:, None] + tail[None, :], rest, mask=tail_inside)
