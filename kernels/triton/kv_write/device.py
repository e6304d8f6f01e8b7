"""Triton kernels of `kv_write`; the arrays are those of the entry (reference/kv_write.py).

CHUNK is the number of sequences whose starts a program loads at once, REST a power of two that is
at least the number of elements of a head that RoPE leaves as they are.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.cache_scale import inverse_scale
from kernelcat.kernels.triton.common.device.rope import (
    find_partners,
    load_angles,
    load_pairs,
    rotate,
    store_pairs,
)
from kernelcat.kernels.triton.common.device.token_slots import (
    find_position,
    find_sequence,
    find_slot,
)


@triton.jit
def naive(
    q, k, v, block_table, kv_lens, cu_q, cos_sin, k_scale, v_scale, q_out, k_cache, v_cache,
    batch, heads, kv_heads, width, rotary_dim,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr,
):  # fmt: skip
    """One head of a token's queries, keys or values a program.

    The other element of each pair that RoPE rotates is loaded a second time.
    """
    token, head, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, HEAD_DIM)
    seq = find_sequence(token, cu_q, batch, CHUNK)
    position = find_position(token, seq, kv_lens, cu_q)
    is_rotated = dims < rotary_dim
    partner, pair, is_first = find_partners(dims, rotary_dim, INTERLEAVED)
    cos, sin = load_angles(cos_sin, position, pair, is_first, is_rotated, rotary_dim)
    if head < heads:
        row = (token.to(tl.int64) * heads + head) * HEAD_DIM
        x = tl.load(q + row + dims).to(tl.float32)
        y = tl.load(q + row + partner, mask=is_rotated, other=0.0).to(tl.float32)
        tl.store(q_out + row + dims, x * cos + y * sin)
    else:  # key and value of one head after the other
        page, slot = find_slot(position, seq, block_table, width, PAGE_SIZE)
        kv_head = (head - heads) // 2
        row = (token.to(tl.int64) * kv_heads + kv_head) * HEAD_DIM
        target = (slot * kv_heads + kv_head) * HEAD_DIM + dims
        if (head - heads) % 2 == 0:
            x = tl.load(k + row + dims).to(tl.float32)
            y = tl.load(k + row + partner, mask=is_rotated, other=0.0).to(tl.float32)
            inverse = inverse_scale(k_scale, page, kv_head, kv_heads, True, HAS_SCALES, PAGE_SCALES)
            tl.store(k_cache + target, (x * cos + y * sin) * inverse)
        else:
            x = tl.load(v + row + dims).to(tl.float32)
            inverse = inverse_scale(v_scale, page, kv_head, kv_heads, True, HAS_SCALES, PAGE_SCALES)
            tl.store(v_cache + target, x * inverse)


@triton.jit
def vectorized(
    q, k, v, block_table, kv_lens, cu_q, cos_sin, k_scale, v_scale, q_out, k_cache, v_cache,
    batch, heads, kv_heads, width,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr,
    ROTARY: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of a token a program: of its keys and values, or of its queries.

    Both elements of a pair are in one thread. The loads of the heads are issued first: they need
    neither the token's sequence nor its position, and their latency overlaps the search for both.
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
        rest_dims = ROTARY + tl.arange(0, REST)
        rest_inside = inside[:, None] & (rest_dims < HEAD_DIM)[None, :]
        rest = tl.load(source[:, None] + rest_dims[None, :], mask=rest_inside, other=0.0)
    dims = tl.arange(0, HEAD_DIM)
    value_inside = (head < (kv_heads if is_kv else 0))[:, None]
    value = tl.load(v + row[:, None] + dims[None, :], mask=value_inside, other=0.0)

    seq = find_sequence(token, cu_q, batch, CHUNK)
    position = find_position(token, seq, kv_lens, cu_q)
    if ROTARY > 0:
        pair = tl.arange(0, PAIRS)
        angles = cos_sin + position.to(tl.int64) * ROTARY + pair
        cos = tl.load(angles, mask=pair < ROTARY // 2, other=1.0)[None, :]
        sin = tl.load(angles + ROTARY // 2, mask=pair < ROTARY // 2, other=0.0)[None, :]
        x, y = rotate(x.to(tl.float32), y.to(tl.float32), cos, sin)
    if is_kv:
        page, slot = find_slot(position, seq, block_table, width, PAGE_SIZE)
        target = (slot * kv_heads + head) * HEAD_DIM
        inverse = inverse_scale(k_scale, page, head, kv_heads, inside, HAS_SCALES, PAGE_SCALES)
        if HAS_SCALES:
            inverse = inverse[:, None]
        if ROTARY > 0:
            store_pairs(
                k_cache + target, x * inverse, y * inverse, inside, ROTARY, PAIRS, INTERLEAVED
            )
        if REST > 0:
            scaled_rest = rest.to(tl.float32) * inverse
            tl.store(k_cache + target[:, None] + rest_dims[None, :], scaled_rest, mask=rest_inside)
        inverse = inverse_scale(v_scale, page, head, kv_heads, inside, HAS_SCALES, PAGE_SCALES)
        if HAS_SCALES:
            inverse = inverse[:, None]
        values = value.to(tl.float32) * inverse
        tl.store(v_cache + target[:, None] + dims[None, :], values, mask=value_inside)
    else:
        if ROTARY > 0:
            store_pairs(q_out + row, x, y, inside, ROTARY, PAIRS, INTERLEAVED)
        if REST > 0:
            tl.store(q_out + row[:, None] + rest_dims[None, :], rest, mask=rest_inside)
