"""Triton kernels of `mla_kv_write`; the arrays are those of the entry (reference/mla_kv_write.py).

`latent`, `factor` and `rotated` are the pointers to the cache (common/device/mla_row.py). CHUNK is
the number of sequences whose starts a program loads at once.
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
from kernelcat.kernels.triton.common.device.rope import load_pairs, rotate, store_pairs
from kernelcat.kernels.triton.common.device.token_slots import (
    find_position,
    find_sequence,
    find_sequences,
    find_slot,
)


@triton.jit
def power_of_two_scales(amax):
    """Scales 2^ceil(log2(max(amax / 448, 1e-4))) of float32 ``amax``, and the inverse scales.

    Exact, and without a division: 448 is 1.75 * 2^8, so that adding 0x1FFFFF to the bits carries
    into the exponent where the mantissa is above 1.75. The smallest scale is 2^-13.
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 127 - 13)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def write_latents(
    x,  # (groups, SCALE_GROUP), NUM_GROUPS groups of a token after one another
    slot,  # (groups,)
    inside,  # (groups,) whether a group is stored
    latent, factor, PACKED: tl.constexpr,
):  # fmt: skip
    """Store groups of latent elements at the slots of their tokens, quantized where PACKED."""
    dims = tl.arange(0, SCALE_GROUP)[None, :]
    group = tl.arange(0, x.shape[0]) % NUM_GROUPS
    if PACKED:
        x = x.to(tl.float32)
        scale, inverse = power_of_two_scales(tl.max(tl.abs(x), 1))
        offset = slot * PACKED_ROW + group * SCALE_GROUP
        codes = (x * inverse[:, None]).to(latent.dtype.element_ty)
        tl.store(latent + offset[:, None] + dims, codes, mask=inside[:, None])
        tl.store(factor + slot * FACTOR_STRIDE + FACTOR_OFFSET + group, scale, mask=inside)
    else:
        offset = slot * ROW + group * SCALE_GROUP
        tl.store(latent + offset[:, None] + dims, x, mask=inside[:, None])


@triton.jit
def rotated_offset(slot, PACKED: tl.constexpr):
    """Offset of the rotated elements of the row at ``slot``."""
    if PACKED:
        return slot * PACKED_ROTATED_STRIDE + PACKED_ROTATED_OFFSET
    else:
        return slot * ROW + LATENT


@triton.jit
def naive(
    c, k_pe, block_table, kv_lens, cu_q, cos_sin, latent, factor, rotated, batch, width,
    CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_ROPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One token a program. The other element of each pair of k_pe is loaded a second time."""
    token = tl.program_id(0)
    seq = find_sequence(token, cu_q, batch, CHUNK)
    position = find_position(token, seq, kv_lens, cu_q)
    _, slot = find_slot(position, seq, block_table, width, PAGE_SIZE)
    group, dims = tl.arange(0, NUM_GROUPS), tl.arange(0, ROPE)
    source = c + token.to(tl.int64) * LATENT + group[:, None] * SCALE_GROUP
    x = tl.load(source + tl.arange(0, SCALE_GROUP)[None, :])
    write_latents(x, slot + group * 0, group < NUM_GROUPS, latent, factor, PACKED)
    pe = k_pe + token.to(tl.int64) * ROPE
    x = tl.load(pe + dims).to(tl.float32)
    if HAS_ROPE:
        if INTERLEAVED:
            is_first, partner, pair = dims % 2 == 0, dims ^ 1, dims // 2
        else:
            is_first, partner, pair = dims < ROPE // 2, dims ^ (ROPE // 2), dims % (ROPE // 2)
        y = tl.load(pe + partner).to(tl.float32)
        angles = cos_sin + position.to(tl.int64) * ROPE + pair
        sin = tl.load(angles + ROPE // 2)
        x = x * tl.load(angles) + y * tl.where(is_first, -sin, sin)
    tl.store(rotated + rotated_offset(slot, PACKED) + dims, x)


@triton.jit
def vectorized(
    c, k_pe, block_table, kv_lens, cu_q, cos_sin, latent, factor, rotated, batch, width, tokens,
    CHUNK: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_ROPE: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program, with both elements of a pair in one thread.

    The loads of c and k_pe are issued first: they need neither the tokens' sequences nor their
    positions, and their latency overlaps the search for both.
    """
    HALF: tl.constexpr = ROPE // 2
    first, groups = tl.program_id(0) * ROWS, tl.arange(0, ROWS * NUM_GROUPS)
    token, group_inside = first + tl.arange(0, ROWS), first + groups // NUM_GROUPS < tokens
    inside = token < tokens
    source = c + first.to(tl.int64) * LATENT + groups[:, None] * SCALE_GROUP
    dims = tl.arange(0, SCALE_GROUP)[None, :]
    values = tl.load(source + dims, mask=group_inside[:, None], other=0.0)
    pe = k_pe + token.to(tl.int64) * ROPE
    x, y = load_pairs(pe, inside, ROPE, HALF, INTERLEAVED)

    token = tl.minimum(token, tokens - 1)
    seq = find_sequences(token, cu_q, batch, CHUNK)
    position = find_position(token, seq, kv_lens, cu_q)
    _, slot = find_slot(position, seq, block_table, width, PAGE_SIZE)
    group_slot = tl.broadcast_to(slot[:, None], (ROWS, NUM_GROUPS)).reshape(ROWS * NUM_GROUPS)
    write_latents(values, group_slot, group_inside, latent, factor, PACKED)
    x, y = x.to(tl.float32), y.to(tl.float32)
    if HAS_ROPE:
        angles = cos_sin + (position.to(tl.int64) * ROPE)[:, None] + tl.arange(0, HALF)[None, :]
        cos, sin = tl.load(angles), tl.load(angles + HALF)
        x, y = rotate(x, y, cos, sin)
    target = rotated + rotated_offset(slot, PACKED)
    store_pairs(target, x, y, inside, ROPE, HALF, INTERLEAVED)
