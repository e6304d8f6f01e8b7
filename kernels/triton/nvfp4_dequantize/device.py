"""Triton kernel of `nvfp4_dequantize`: codes and block scales -> x."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4 import scale_blocks, scale_place, unpack_codes


@triton.jit
def dequantize(
    q,  # (M, K / 2) bytes
    scale,  # bytes, (M, K / block) linear or swizzled
    global_scale,  # (1,) float32, of NVFP4
    x,  # (M, K)
    M, K,
    NVFP4: tl.constexpr, SWIZZLED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS elements a program; the programs of a row of tiles follow one another.

    A NaN is stored as the bits that conversions give it: all ones but the sign.
    """
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    tiles_across = tl.cdiv(K, COLS)
    first_row, tile = tl.program_id(0) // tiles_across * ROWS, tl.program_id(0) % tiles_across
    rows, pairs = first_row + tl.arange(0, ROWS), tile * (COLS // 2) + tl.arange(0, COLS // 2)
    offsets = rows[:, None].to(tl.int64) * (K // 2) + pairs[None, :]
    inside = (rows < M)[:, None] & (pairs < K // 2)[None, :]
    codes = tl.load(q + offsets, mask=inside, other=0, eviction_policy="evict_first")

    blocks = tile * (COLS // SIZE) + tl.arange(0, COLS // SIZE)
    inside = (rows < M)[:, None] & (blocks < K // SIZE)[None, :]
    scales = tl.load(scale + scale_place(rows, blocks, K // SIZE, SWIZZLED), mask=inside, other=0)
    values = scale_blocks(unpack_codes(codes), scales, NVFP4)
    if NVFP4:
        values *= tl.load(global_scale)

    dtype: tl.constexpr = x.dtype.element_ty
    integer: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    NAN: tl.constexpr = 0x7FFFFFFF if dtype.primitive_bitwidth == 32 else 0x7FFF
    bits = tl.where(values != values, NAN, values.to(dtype).to(integer, bitcast=True)).to(integer)
    cols = tile * COLS + tl.arange(0, COLS)
    offsets = rows[:, None].to(tl.int64) * K + cols[None, :]
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    tl.store(x + offsets, bits.to(dtype, bitcast=True), mask=inside)
