"""Tiles of weights in NVFP4 and MXFP4, decoded when they are loaded, in rows or in tiles.

The two orders of codes and scales are those of reference/_fp4.py and reference/_fp4_tiles.py.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4 import (
    decode_tiny,
    scale_blocks,
    scale_place,
    unpack_codes,
)


@triton.jit
def load_rows(
    codes,  # bytes (num_rows, K / 2)
    scale,  # bytes (num_rows, K / block), linear or swizzled
    rows, k, num_rows, K,
    dtype: tl.constexpr, NVFP4: tl.constexpr, SWIZZLED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Values [rows, k : k + BLOCK_K] of codes in rows, zeros past the edges."""
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    pairs, blocks = k // 2 + tl.arange(0, BLOCK_K // 2), k // SIZE + tl.arange(0, BLOCK_K // SIZE)
    offsets = rows[:, None].to(tl.int64) * (K // 2) + pairs[None, :]
    inside = (rows < num_rows)[:, None]
    packed = tl.load(codes + offsets, mask=inside & (pairs < K // 2)[None, :], other=0)
    offsets = scale_place(rows, blocks, K // SIZE, SWIZZLED)
    scales = tl.load(scale + offsets, mask=inside & (blocks < K // SIZE)[None, :], other=0)
    return scale_blocks(unpack_codes(packed), scales, NVFP4).to(dtype)


@triton.jit
def load_tiles(
    w,  # bytes (N / 16, K / 64, 512), N and K padded
    w_scale,  # bytes (N / 16, K / 64, 16 * 64 / block)
    cols, k, N, K, dtype: tl.constexpr, NVFP4: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Values [cols, k : k + BLOCK_K] of weights in tiles of 16 x 64, loaded code by code."""
    TILE_BLOCKS: tl.constexpr = 4 if NVFP4 else 2
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    ks, blocks = k + tl.arange(0, BLOCK_K), k // SIZE + tl.arange(0, BLOCK_K // SIZE)
    tiles_across = tl.cdiv(K, 64)
    tile = (cols // 16).to(tl.int64)[:, None] * tiles_across
    nibble = cols[:, None] % 16 // 8 + (ks % 16 // 8 * 2 + ks % 2 * 4)[None, :]
    lane = cols[:, None] % 8 * 4 + (ks % 8 // 2)[None, :]
    in_tile = lane * 16 + (ks % 64 // 16 * 4)[None, :] + nibble // 2
    inside = (cols < N)[:, None] & (ks < K)[None, :]
    packed = tl.load(w + (tile + (ks // 64)[None, :]) * 512 + in_tile, mask=inside, other=0)
    bits = (packed.to(tl.int32) >> (nibble % 2 * 4)) << 28
    tiny = decode_tiny(bits)

    in_tile = (cols % 8 * 2 + cols % 16 // 8)[:, None] * TILE_BLOCKS
    in_tile += (blocks % TILE_BLOCKS)[None, :]
    inside = (cols < N)[:, None] & (blocks < K // SIZE)[None, :]
    offsets = (tile + (blocks // TILE_BLOCKS)[None, :]) * (16 * TILE_BLOCKS) + in_tile
    scales = tl.load(w_scale + offsets, mask=inside, other=0)
    return scale_blocks(tiny * 8.507059173023462e37, scales, NVFP4).to(dtype)  # 2^126
