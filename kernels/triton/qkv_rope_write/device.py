"""Triton kernels of `qkv_rope_write`; the arrays are those of reference/qkv_rope_write.py.

CHUNK is the number of sequences whose starts a program loads at once.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.cache_scale import inverse_scale
from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.rope import find_partners, load_angles, rotate
from kernelcat.kernels.triton.common.device.split_k import sum_splits_at_once
from kernelcat.kernels.triton.common.device.token_slots import (
    find_position,
    find_sequence,
    find_sequences,
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
        is_rotated = dims < rotary_dim
        partner, pair, is_first = find_partners(dims, rotary_dim, INTERLEAVED)
        partner = tl.where(is_rotated, partner, dims)
        cos, sin = load_angles(cos_sin, position, pair, is_first, is_rotated, rotary_dim)
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


@triton.jit
def pair_dims(row, rotary_dim, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The element of a head that row ``row`` of a tile holds: first elements of pairs, then second.

    Elements that RoPE leaves as they are make pairs of neighbours, after those that it rotates.
    """
    pair, second = row % HALF, row // HALF
    num_pairs = rotary_dim // 2
    if INTERLEAVED:
        return 2 * pair + second
    else:
        return tl.where(pair < num_pairs, pair + second * num_pairs, 2 * pair + second)


@triton.jit
def normalized_product(
    w,  # (HEAD_DIM,) pointers to rows of weights
    x,  # (BLOCK_T,) pointers to rows of tokens
    norm_weight,  # (hidden,)
    begin, end, hidden, eps, SCALES_FIRST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns begin to end of w @ (x * norm_weight)^T, and the sums of squares of these columns.

    Sums (HEAD_DIM, BLOCK_T) float32 still have to be divided by the roots of the mean squares. With
    SCALES_FIRST x is divided by them before the product, and the squares are those of all columns.
    """
    ks = tl.arange(0, BLOCK_K)
    w, x = w[:, None] + ks[None, :], x[:, None] + ks[None, :]
    squares = tl.zeros((x.shape[0],), tl.float32)
    scale = squares + 1.0
    if SCALES_FIRST:
        for k in range(0, hidden, BLOCK_K):
            value = tl.load(x + k, mask=(ks < hidden - k)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(value * value, 1)
        scale = 1.0 / tl.sqrt(squares / tl.maximum(hidden, 1) + eps)
    acc = tl.zeros((w.shape[0], x.shape[0]), tl.float32)
    for k in range(begin, end, BLOCK_K):
        inside = ks < hidden - k
        w_tile = tl.load(w + k, mask=inside[None, :], other=0.0)
        x_tile = tl.load(x + k, mask=inside[None, :], other=0.0)
        factor = tl.load(norm_weight + k + ks, mask=inside, other=0.0).to(tl.float32)
        value = x_tile.to(tl.float32)
        if not SCALES_FIRST:
            squares += tl.sum(value * value, 1)
        a = (value * scale[:, None] * factor[None, :]).to(x_tile.dtype)
        acc = tl.dot(w_tile, a.T, acc)
    return acc, squares


@triton.jit
def tiled(
    x, norm_weight, wq, wk, wv, block_table, kv_lens, cu_q, cos_sin, bq, bk, bv, k_scale, v_scale,
    q_out, k_cache, v_cache,
    squares,  # (tiles, SPLIT_K, BLOCK_T) float32
    partials, arrivals, tokens, batch, heads, kv_heads, width, rotary_dim, hidden, split_depth, eps,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr, PAGE_SCALES: tl.constexpr,
    BIAS: tl.constexpr, SCALES_FIRST: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A head of queries, keys or values for BLOCK_T tokens a program; axis 1 splits the columns.

    Rows of a head are in the order of `pair_dims`, so both elements of a pair are in one thread.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    row, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_query = row < heads
    is_value = row >= heads + kv_heads
    head = row if is_query else (row - heads) % kv_heads
    w = wq if is_query else (wv if is_value else wk)
    dims = pair_dims(tl.arange(0, HEAD_DIM), rotary_dim, HALF, INTERLEAVED)
    token = group * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    begin = split * split_depth
    await_previous(DEPENDENT)
    acc, sums = normalized_product(
        w + (head * HEAD_DIM + dims).to(tl.int64) * hidden, x + token.to(tl.int64) * hidden,
        norm_weight, begin, min(hidden, begin + split_depth), hidden, eps, SCALES_FIRST, BLOCK_K,
    )  # fmt: skip
    place = group * tl.num_programs(0) + row
    places = squares + (place * SPLIT_K).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if SPLIT_K > 1:
        tl.store(places + split * BLOCK_T, sums)
    acc, is_last = sum_splits_at_once(acc, partials, arrivals, place, split, SPLIT_K, PARTS)
    if is_last:
        if not SCALES_FIRST:
            if SPLIT_K > 1:
                parts = tl.arange(0, PARTS)[:, None]
                sums = tl.load(
                    places[None, :] + parts * BLOCK_T, mask=parts < SPLIT_K, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                sums = tl.sum(sums, 0)
            acc *= (1.0 / tl.sqrt(sums / tl.maximum(hidden, 1) + eps))[None, :]
        if BIAS:
            bias = (bq if is_query else (bv if is_value else bk)) + head * HEAD_DIM
            acc += tl.load(bias + dims).to(tl.float32)[:, None]
        z, other = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_T)), (1, 2, 0)))
        seq = find_sequences(token, cu_q, batch, CHUNK)
        position = find_position(token, seq, kv_lens, cu_q)
        pair = tl.arange(0, HALF)
        if not is_value:
            num_pairs = rotary_dim // 2
            angles = cos_sin + (position.to(tl.int64) * rotary_dim)[None, :] + pair[:, None]
            is_rotated = (pair < num_pairs)[:, None]
            cos = tl.load(angles, mask=is_rotated, other=1.0)
            sin = tl.load(angles + num_pairs, mask=is_rotated, other=0.0)
            z, other = rotate(z, other, cos, sin)
        first = pair_dims(pair, rotary_dim, HALF, INTERLEAVED)[:, None]
        second = pair_dims(pair + HALF, rotary_dim, HALF, INTERLEAVED)[:, None]
        if is_query:
            row_of_q = q_out + ((token.to(tl.int64) * heads + head) * HEAD_DIM)[None, :]
            tl.store(row_of_q + first, z, mask=inside[None, :])
            tl.store(row_of_q + second, other, mask=inside[None, :])
        else:
            page, slot = find_slot(position, seq, block_table, width, PAGE_SIZE)
            if HAS_SCALES:
                scale = v_scale if is_value else k_scale
                page = page if PAGE_SCALES else page * 0
                inverse = inverse_scale(scale, page, head, kv_heads, inside, True, True)
                z, other = z * inverse[None, :], other * inverse[None, :]
            target = v_cache if is_value else k_cache
            target += ((slot * kv_heads + head) * HEAD_DIM)[None, :]
            tl.store(target + first, z, mask=inside[None, :])
            tl.store(target + second, other, mask=inside[None, :])
