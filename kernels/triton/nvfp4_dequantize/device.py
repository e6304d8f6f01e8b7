"""Triton kernel of `nvfp4_dequantize`: q (M, K / 2) bytes and scales -> x (M, K)."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.nvfp4_quantize.fp4 import (
    mxfp4_factors,
    nvfp4_factors,
    scale_place,
    spread,
    unpacked,
)


@triton.jit
def dequantize(
    q, scale, global_scale, x, M, K,
    NVFP4: tl.constexpr, SWIZZLED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS a program, columns fastest. A NaN has the bits that conversions give it."""
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    tiles = tl.cdiv(K, COLS)
    first_row, tile = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles
    rows, halves = first_row + tl.arange(0, ROWS), tile * (COLS // 2) + tl.arange(0, COLS // 2)
    at = rows[:, None].to(tl.int64) * (K // 2) + halves[None, :]
    inside = (rows < M)[:, None] & (halves < K // 2)[None, :]
    pairs = tl.load(q + at, mask=inside, other=0, eviction_policy="evict_first")

    blocks = tile * (COLS // SIZE) + tl.arange(0, COLS // SIZE)
    inside = (rows < M)[:, None] & (blocks < K // SIZE)[None, :]
    scales = tl.load(scale + scale_place(rows, blocks, K // SIZE, SWIZZLED), mask=inside, other=0)
    if NVFP4:
        values = unpacked(pairs) * spread(nvfp4_factors(scales), SIZE) * tl.load(global_scale)
    else:
        values = unpacked(pairs) * spread(mxfp4_factors(scales), SIZE)

    kind: tl.constexpr = x.dtype.element_ty
    integer: tl.constexpr = tl.int32 if kind.primitive_bitwidth == 32 else tl.int16
    NAN: tl.constexpr = 0x7FFFFFFF if kind.primitive_bitwidth == 32 else 0x7FFF
    bits = tl.where(values != values, NAN, values.to(kind).to(integer, bitcast=True)).to(integer)
    cols = tile * COLS + tl.arange(0, COLS)
    at = rows[:, None].to(tl.int64) * K + cols[None, :]
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    tl.store(x + at, bits.to(kind, bitcast=True), mask=inside)
