"""Triton kernels of `qkv_rope_write`; the arrays are those of reference/qkv_rope_write.py.

CHUNK is the number of sequences whose starts a program loads at once.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.cache_scale import inverse_scale
from kernelcat.kernels.triton.common.device.token_slots import (
    find_position,
    find_sequence,
    find_slot,
)


@triton.jit
def root_mean_square(x, hidden, eps, BLOCK_K: tl.constexpr):
    """Root of the mean square of row ``x`` (hidden,), with eps."""
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, hidden, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        value = tl.load(x + columns, mask=columns < hidden, other=0.0).to(tl.float32)
        squares += value * value
    return tl.sqrt(tl.sum(squares, 0) / tl.maximum(hidden, 1) + eps)


@triton.jit
def project(x, norm_weight, root, w, bias, dims, hidden, BIAS: tl.constexpr,
            BLOCK_K: tl.constexpr):  # fmt: skip
    """Elements ``dims`` of a head: rows of ``w`` (head_dim, hidden) times the normalized row."""
    z = tl.zeros(dims.shape, tl.float32)
    for first in range(0, hidden, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        inside = columns < hidden
        value = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(norm_weight + columns, mask=inside, other=0.0)
        a = (value / root * factor.to(tl.float32)).to(factor.dtype).to(tl.float32)
        rows = w + dims.to(tl.int64)[:, None] * hidden + columns[None, :]
        z += tl.sum(tl.load(rows, mask=inside[None, :], other=0.0).to(tl.float32) * a[None, :], 1)
    if BIAS:
        z += tl.load(bias + dims).to(tl.float32)
    return z


@triton.jit
def naive(
    x, norm_weight, wq, wk, wv, block_table, kv_lens, cu_q, cos_sin, bq, bk, bv, k_scale, v_scale,
    q_out, k_cache, v_cache, batch, heads, kv_heads, width, rotary_dim, hidden, eps,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One head of a token's queries, keys or values a program.

    The other element of each pair that RoPE rotates is computed a second time.
    """
    token, row, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, HEAD_DIM)
    is_query = row < heads
    is_value = row >= heads + kv_heads
    head = row if is_query else (row - heads) % kv_heads
    w = wq if is_query else (wv if is_value else wk)
    bias = bq
    if BIAS:
        bias = (bq if is_query else (bv if is_value else bk)) + head * HEAD_DIM
    w += head.to(tl.int64) * HEAD_DIM * hidden
    x += token.to(tl.int64) * hidden
    root = root_mean_square(x, hidden, eps, BLOCK_K)
    z = project(x, norm_weight, root, w, bias, dims, hidden, BIAS, BLOCK_K)

    seq = find_sequence(token, cu_q, batch, CHUNK)
    position = find_position(token, seq, kv_lens, cu_q)
    if not is_value:
        half = rotary_dim // 2
        is_rotated = dims < rotary_dim
        if INTERLEAVED:
            is_first, partner, pair = dims % 2 == 0, dims ^ 1, dims // 2
        else:
            is_first = dims < half
            partner, pair = tl.where(is_first, dims + half, dims - half), dims % tl.maximum(half, 1)
        partner = tl.where(is_rotated, partner, dims)
        angles = cos_sin + position.to(tl.int64) * rotary_dim + pair
        cos = tl.load(angles, mask=is_rotated, other=1.0)
        sin = tl.load(angles + half, mask=is_rotated, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        other = project(x, norm_weight, root, w, bias, partner, hidden, BIAS, BLOCK_K)
        z = z * cos + other * sin
    if is_query:
        tl.store(q_out + (token.to(tl.int64) * heads + head) * HEAD_DIM + dims, z)
    else:
        page, slot = find_slot(position, seq, block_table, width, PAGE_SIZE)
        target = (slot * kv_heads + head) * HEAD_DIM + dims
        if is_value:
            inverse = inverse_scale(v_scale, page, head, kv_heads, True, HAS_SCALES, PAGE_SCALES)
            tl.store(v_cache + target, z * inverse)
        else:
            inverse = inverse_scale(k_scale, page, head, kv_heads, True, HAS_SCALES, PAGE_SCALES)
            tl.store(k_cache + target, z * inverse)
