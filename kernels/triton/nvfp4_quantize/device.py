"""Triton kernel of `nvfp4_quantize`: x -> packed codes and block scales."""

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
def sum_columns(values):
    """(rows, columns) -> (rows,): adjacent columns are added, then adjacent sums, and so on."""
    ROWS: tl.constexpr = values.shape[0]
    for _ in tl.static_range(16):  # halvings of the longest row
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, (ROWS, values.shape[1] // 2, 2)), axis=2)
    return tl.reshape(values, (ROWS,))


@triton.jit
def normalize(x, weight, cols, inside, K, eps):
    """RMSNorm of whole rows x (rows, columns), which are zero beyond K; weight (K,)."""
    root = tl.sqrt_rn(tl.div_rn(sum_columns(x * x), K.to(tl.float32)) + eps)
    weights = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    return x * tl.div_rn(1.0, root)[:, None] * weights[None, :]


@triton.jit
def butterflies(h, STEP: tl.constexpr):
    """Sums and differences of elements STEP apart, of h (groups, 16)."""
    GROUPS: tl.constexpr = h.shape[0]
    pairs = tl.reshape(h, (GROUPS, 16 // (2 * STEP), 2, STEP))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (GROUPS, 16))


@triton.jit
def rotate(h, signs):
    """Hadamard transform of every 16 adjacent columns of h (rows, columns) times signs (16,)."""
    ROWS: tl.constexpr = h.shape[0]
    COLS: tl.constexpr = h.shape[1]
    h = tl.reshape(h, (ROWS * COLS // 16, 16)) * tl.load(signs + tl.arange(0, 16))[None, :]
    h = butterflies(butterflies(butterflies(butterflies(h, 1), 2), 4), 8)
    return tl.reshape(h * 0.25, (ROWS, COLS))


@triton.jit
def nine_bits(seed, rows, first_col, K, COLS: tl.constexpr):
    """Nine random bits for each element (rows, COLS), from Philox with key ``seed`` (2,).

    One counter serves 16 adjacent columns (reference/_philox.py).
    """
    ROWS: tl.constexpr = rows.shape[0]
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    key = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    groups = first_col // 16 + tl.arange(0, COLS // 16)
    counter = rows.to(tl.int64)[:, None] * (K // 16) + groups[None, :]
    zeros = tl.zeros((ROWS, COLS // 16), tl.uint32)
    first, second, third, fourth = tl.philox(
        key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zeros, zeros
    )
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    words = tl.reshape(words, (ROWS, COLS // 4))
    halves = tl.interleave(words & 0xFFFF, words >> 16)
    return tl.interleave(halves & 0x1FF, halves >> 7).to(tl.int32)


@triton.jit
def round_to_float16(y):
    """Values of at most 6, rounded as 2^-14 of them are in float16: to nine bits below a code."""
    small = tl.maximum(tl.minimum(y, 6.0), -6.0) * 6.103515625e-05
    return small.to(tl.float16).to(tl.float32) * 16384.0


@triton.jit
def quantize(
    x,  # (M, K)
    global_scale,  # (1,) float32, of NVFP4
    weight,  # (K,), of RMSNorm
    signs,  # (16,) float32, of the Hadamard transform
    seed,  # (2,) int32, of stochastic rounding
    q,  # (M, K / 2) bytes
    scale,  # bytes, (M, K / block) linear or swizzled
    M, K, eps,
    NVFP4: tl.constexpr, SWIZZLED: tl.constexpr, RMS_NORM: tl.constexpr, HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS elements a program; the programs of a row of tiles follow one another.

    With RMS_NORM a program has whole rows: COLS is a power of two, and no less than K. Where
    scales are padded, programs also cover the padding.
    """
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    BLOCKS: tl.constexpr = COLS // SIZE
    num_blocks = K // SIZE
    end_row, end_block = M, num_blocks
    if SWIZZLED:
        end_row, end_block = tl.cdiv(M, 128) * 128, tl.cdiv(num_blocks, 4) * 4
    tiles_across = tl.cdiv(end_block, BLOCKS)
    first_row, tile = tl.program_id(0) // tiles_across * ROWS, tl.program_id(0) % tiles_across
    rows, cols = first_row + tl.arange(0, ROWS), tile * COLS + tl.arange(0, COLS)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    offsets = rows[:, None].to(tl.int64) * K + cols[None, :]
    h = tl.load(x + offsets, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if RMS_NORM:
        h = normalize(h, weight, cols, cols < K, K, eps)
    if HADAMARD:
        h = rotate(h, signs)

    # As integers, the bits of NaNs are above those of infinity.
    magnitudes = tl.reshape(tl.abs(h).to(tl.int32, bitcast=True), (ROWS, BLOCKS, SIZE))
    amax = tl.max(magnitudes, axis=2)
    has_nan = amax > INFINITY
    amax = tl.where(has_nan, 0, amax)
    if NVFP4:
        code, inverse = encode_nvfp4_scales(
            amax.to(tl.float32, bitcast=True), tl.load(global_scale)
        )
        code = tl.where(has_nan, 0x7F, code)
    else:
        code, inverse = encode_mxfp4_scales(amax)
        code = tl.where(has_nan, 0xFF, code)
    blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
    is_block = (rows < M)[:, None] & (blocks < num_blocks)[None, :]
    is_stored = (rows < end_row)[:, None] & (blocks < end_block)[None, :]
    places = scale_place(rows, blocks, num_blocks, SWIZZLED)
    tl.store(scale + places, tl.where(is_block, code, 0).to(tl.uint8), mask=is_stored)

    y = h * repeat_columns(inverse, SIZE)
    if STOCHASTIC:
        random = nine_bits(seed, rows, tile * COLS, K, COLS)
        codes = random_codes(round_to_float16(y), random << 7)
    else:
        codes = nearest_codes(y)
    packed = pack_codes(tl.where(repeat_columns(has_nan.to(tl.int32), SIZE) != 0, 0, codes))
    pairs = tile * (COLS // 2) + tl.arange(0, COLS // 2)
    offsets = rows[:, None].to(tl.int64) * (K // 2) + pairs[None, :]
    tl.store(q + offsets, packed, mask=(rows < M)[:, None] & (pairs < K // 2)[None, :])
