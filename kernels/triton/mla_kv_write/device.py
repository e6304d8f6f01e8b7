"""Triton kernels of `mla_kv_write`; the arrays are those of the entry.

The three pointers to the cache are to the same memory: `latent` and `rotated` have the cache's
type, or where PACKED those of a row of 656 bytes, and `factor` is that of its scales.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.kv_write.device import (
    load_pairs,
    position_of,
    sequence_of,
    slot_of,
    store_pairs,
)

LATENT = tl.constexpr(512)
ROPE = tl.constexpr(64)
ROW = tl.constexpr(576)
PACKED_ROW = tl.constexpr(656)
GROUP = tl.constexpr(128)
"""Latent elements that share a scale."""
GROUPS = tl.constexpr(4)


@triton.jit
def sequences_of(token, cu_q, batch, CHUNK: tl.constexpr):
    """As `sequence_of`, of a vector of tokens."""
    s = token * 0
    for first in range(1, batch, CHUNK):
        others = first + tl.arange(0, CHUNK)
        starts = tl.load(cu_q + others, mask=others < batch, other=2147483647)
        s += tl.sum((starts[None, :] <= token[:, None]).to(tl.int32), 1)
    return s


@triton.jit
def scales_of(most):
    """2^ceil(log2(max(most / 448, 1e-4))), and 1 / that, by bits and without a division.

    448 is 1.75 * 2^8, so that a mantissa beyond 1.75 takes the next power of two; 2^-13 is the
    least.
    """
    bits = most.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 127 - 13)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def write_latents(x, slot, inside, latent, factor, PACKED: tl.constexpr):
    """Groups x (groups, 128) of tokens at `slot` (groups,), four in a row for each token."""
    dims = tl.arange(0, GROUP)[None, :]
    group = tl.arange(0, x.shape[0]) % GROUPS
    if PACKED:
        x = x.to(tl.float32)
        scale, inverse = scales_of(tl.max(tl.abs(x), 1))
        at = slot * PACKED_ROW + group * GROUP
        codes = (x * inverse[:, None]).to(latent.dtype.element_ty)
        tl.store(latent + at[:, None] + dims, codes, mask=inside[:, None])
        tl.store(factor + slot * (PACKED_ROW // 4) + LATENT // 4 + group, scale, mask=inside)
    else:
        at = slot * ROW + group * GROUP
        tl.store(latent + at[:, None] + dims, x, mask=inside[:, None])


@triton.jit
def rotated_at(slot, PACKED: tl.constexpr):
    """Where the rotated part of the token at `slot` begins, in its elements."""
    if PACKED:
        return slot * (PACKED_ROW // 2) + (LATENT + 4 * GROUPS) // 2
    else:
        return slot * ROW + LATENT


@triton.jit
def naive(
    c, k_pe, block_table, kv_lens, cu_q, cos_sin, latent, factor, rotated, batch, width,
    CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, TURNS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """A token a program; partners are loaded once more."""
    token = tl.program_id(0)
    s = sequence_of(token, cu_q, batch, CHUNK)
    at = position_of(token, s, kv_lens, cu_q)
    _, slot = slot_of(at, s, block_table, width, PAGE_SIZE)
    group, dims = tl.arange(0, GROUPS), tl.arange(0, ROPE)
    source = c + token.to(tl.int64) * LATENT + group[:, None] * GROUP
    x = tl.load(source + tl.arange(0, GROUP)[None, :])
    write_latents(x, slot + group * 0, group < GROUPS, latent, factor, PACKED)
    pe = k_pe + token.to(tl.int64) * ROPE
    x = tl.load(pe + dims).to(tl.float32)
    if TURNS:
        if INTERLEAVED:
            is_first, partner, pair = dims % 2 == 0, dims ^ 1, dims // 2
        else:
            is_first, partner, pair = dims < ROPE // 2, dims ^ (ROPE // 2), dims % (ROPE // 2)
        y = tl.load(pe + partner).to(tl.float32)
        angles = cos_sin + at.to(tl.int64) * ROPE + pair
        sin = tl.load(angles + ROPE // 2)
        x = x * tl.load(angles) + y * tl.where(is_first, -sin, sin)
    tl.store(rotated + rotated_at(slot, PACKED) + dims, x)


@triton.jit
def vectorized(
    c, k_pe, block_table, kv_lens, cu_q, cos_sin, latent, factor, rotated, batch, width, tokens,
    CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, TURNS: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program, with both elements of a pair in one thread.

    The rows are asked for before it is known where in their sequences the tokens are.
    """
    first, groups = tl.program_id(0) * ROWS, tl.arange(0, ROWS * GROUPS)
    token, group_inside = first + tl.arange(0, ROWS), first + groups // GROUPS < tokens
    inside = token < tokens
    source = c + first.to(tl.int64) * LATENT + groups[:, None] * GROUP
    values = tl.load(source + tl.arange(0, GROUP)[None, :], mask=group_inside[:, None], other=0.0)
    pe = k_pe + token.to(tl.int64) * ROPE
    x, y = load_pairs(pe, inside, 64, 32, INTERLEAVED)

    token = tl.minimum(token, tokens - 1)
    s = sequences_of(token, cu_q, batch, CHUNK)
    at = position_of(token, s, kv_lens, cu_q)
    _, slot = slot_of(at, s, block_table, width, PAGE_SIZE)
    group_slot = tl.broadcast_to(slot[:, None], (ROWS, GROUPS)).reshape(ROWS * GROUPS)
    write_latents(values, group_slot, group_inside, latent, factor, PACKED)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if TURNS:
        angles = cos_sin + (at.to(tl.int64) * ROPE)[:, None] + tl.arange(0, ROPE // 2)[None, :]
        cos, sin = tl.load(angles), tl.load(angles + ROPE // 2)
        x, y = x * cos - y * sin, y * cos + x * sin
    target = rotated + rotated_at(slot, PACKED)
    store_pairs(target, x, y, inside, 64, 32, INTERLEAVED)
