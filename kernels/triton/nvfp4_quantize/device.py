"""Triton kernel of `nvfp4_quantize`: x (M, K) -> q (M, K / 2) bytes, scale in either layout."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4 import (
    INFINITY,
    encode_mxfp4_scales,
    encode_nvfp4_scales,
    nearest_codes,
    pack_codes,
    random_codes,
    repeat_columns,
    scale_place,
)


@triton.jit
def neighbours_sum(values):
    """(rows, columns) -> (rows,): neighbours first, then neighbouring sums."""
    ROWS: tl.constexpr = values.shape[0]
    for _ in tl.static_range(16):  # halvings of the longest row
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, (ROWS, values.shape[1] // 2, 2)), axis=2)
    return tl.reshape(values, (ROWS,))


@triton.jit
def normalized(x, weight, cols, inside, K, eps):
    """RMSNorm of whole rows, of which what is beyond K is zero."""
    root = tl.sqrt_rn(tl.div_rn(neighbours_sum(x * x), K.to(tl.float32)) + eps)
    weights = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    return x * tl.div_rn(1.0, root)[:, None] * weights[None, :]


@triton.jit
def butterflies(h, STEP: tl.constexpr):
    """Sums and differences of elements STEP apart, of (groups, 16)."""
    GROUPS: tl.constexpr = h.shape[0]
    pairs = tl.reshape(h, (GROUPS, 16 // (2 * STEP), 2, STEP))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (GROUPS, 16))


@triton.jit
def rotated(h, signs):
    """The Hadamard transform of every 16 neighbours times ``signs``."""
    ROWS: tl.constexpr = h.shape[0]
    COLS: tl.constexpr = h.shape[1]
    h = tl.reshape(h, (ROWS * COLS // 16, 16)) * tl.load(signs + tl.arange(0, 16))[None, :]
    h = butterflies(butterflies(butterflies(butterflies(h, 1), 2), 4), 8)
    return tl.reshape(h * 0.25, (ROWS, COLS))


@triton.jit
def nine_bits(seed, rows, first_col, K, COLS: tl.constexpr):
    """Nine random bits an element of (rows, COLS): sixteen neighbours share Philox's counter."""
    ROWS: tl.constexpr = rows.shape[0]
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    key = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    groups = first_col // 16 + tl.arange(0, COLS // 16)
    place = rows.to(tl.int64)[:, None] * (K // 16) + groups[None, :]
    zeros = tl.zeros((ROWS, COLS // 16), tl.uint32)
    first, second, third, fourth = tl.philox(
        key, place.to(tl.uint32), (place >> 32).to(tl.uint32), zeros, zeros
    )
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    words = tl.reshape(words, (ROWS, COLS // 4))
    halves = tl.interleave(words & 0xFFFF, words >> 16)
    return tl.interleave(halves & 0x1FF, halves >> 7).to(tl.int32)


@triton.jit
def rounded_to_halves(y):
    """Values of 6 at most with nine bits below a code: 2^-14 of them are float16."""
    small = tl.maximum(tl.minimum(y, 6.0), -6.0) * 6.103515625e-05
    return small.to(tl.float16).to(tl.float32) * 16384.0


@triton.jit
def quantize(
    x, global_scale, weight, signs, seed, q, scale, M, K, eps,
    NVFP4: tl.constexpr, SWIZZLED: tl.constexpr, RMS_NORM: tl.constexpr, HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS a program, columns fastest; with RMS_NORM COLS is a power of two that K fits in.

    Where scales are padded, programs reach into the padding.
    """
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    BLOCKS: tl.constexpr = COLS // SIZE
    num_blocks = K // SIZE
    end_row, end_block = M, num_blocks
    if SWIZZLED:
        end_row, end_block = tl.cdiv(M, 128) * 128, tl.cdiv(num_blocks, 4) * 4
    tiles = tl.cdiv(end_block, BLOCKS)
    first_row, tile = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles
    rows, cols = first_row + tl.arange(0, ROWS), tile * COLS + tl.arange(0, COLS)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows[:, None].to(tl.int64) * K + cols[None, :]
    h = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if RMS_NORM:
        h = normalized(h, weight, cols, cols < K, K, eps)
    if HADAMARD:
        h = rotated(h, signs)

    # As integers NaNs are above infinity.
    sizes = tl.reshape(tl.abs(h).to(tl.int32, bitcast=True), (ROWS, BLOCKS, SIZE))
    largest = tl.max(sizes, axis=2)
    missing = largest > INFINITY
    largest = tl.where(missing, 0, largest)
    if NVFP4:
        code, inverse = encode_nvfp4_scales(
            largest.to(tl.float32, bitcast=True), tl.load(global_scale)
        )
        code = tl.where(missing, 0x7F, code)
    else:
        code, inverse = encode_mxfp4_scales(largest)
        code = tl.where(missing, 0xFF, code)
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
    real = (rows < M)[:, None] & (blocks < num_blocks)[None, :]
    written = (rows < end_row)[:, None] & (blocks < end_block)[None, :]
    place = scale_place(rows, blocks, num_blocks, SWIZZLED)
    tl.store(scale + place, tl.where(real, code, 0).to(tl.uint8), mask=written)

    y = h * repeat_columns(inverse, SIZE)
    if STOCHASTIC:
        random = nine_bits(seed, rows, tile * COLS, K, COLS)
        codes = random_codes(rounded_to_halves(y), random << 7)
    else:
        codes = nearest_codes(y)
    pairs = pack_codes(tl.where(repeat_columns(missing.to(tl.int32), SIZE) != 0, 0, codes))
    halves = tile * (COLS // 2) + tl.arange(0, COLS // 2)
    at = rows[:, None].to(tl.int64) * (K // 2) + halves[None, :]
    tl.store(q + at, pairs, mask=(rows < M)[:, None] & (halves < K // 2)[None, :])
