"""Triton kernel of `rms_norm`: whole rows in registers, from the residual to the stored result."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4 import (
    encode_nvfp4_scales,
    nearest_codes,
    pack_codes,
    repeat_columns,
)
from kernelcat.kernels.triton.common.device.fp8 import clamp_amax, inverse_of, scale_of
from kernelcat.kernels.triton.nvfp4_quantize.device import normalize


@triton.jit
def block_amax(y, SIZE: tl.constexpr):
    """(rows, columns) -> (rows, columns / SIZE): the largest magnitudes of blocks of a row."""
    BLOCKS: tl.constexpr = y.shape[1] // SIZE
    return tl.max(tl.reshape(tl.abs(y), (y.shape[0], BLOCKS, SIZE)), axis=2)


@triton.jit
def store_fp8(y, rows, cols, inside, out, scale, M, N, COLS: tl.constexpr):
    """Quantizes y in blocks of 1 x 128; scales (ceil(N / 128), M)."""
    offsets = rows[:, None].to(tl.int64) * N + cols[None, :]
    amax = clamp_amax(block_amax(y, 128))
    blocks = tl.arange(0, COLS // 128)
    places = blocks[None, :].to(tl.int64) * M + rows[:, None]
    is_block = (rows < M)[:, None] & (blocks < tl.cdiv(N, 128))[None, :]
    tl.store(scale + places, scale_of(amax), mask=is_block)
    q = y * repeat_columns(inverse_of(amax), 128)
    tl.store(out + offsets, q.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_nvfp4(y, rows, global_scale, out, scale, M, N, COLS: tl.constexpr):
    """Quantizes y in blocks of 16; bytes (M, N / 2) and scales (M, N / 16)."""
    code, inverse = encode_nvfp4_scales(block_amax(y, 16), tl.load(global_scale))
    blocks, pairs = tl.arange(0, COLS // 16), tl.arange(0, COLS // 2)
    places = rows[:, None].to(tl.int64) * (N // 16) + blocks[None, :]
    is_block = (rows < M)[:, None] & (blocks < N // 16)[None, :]
    tl.store(scale + places, code.to(tl.uint8), mask=is_block)
    packed = pack_codes(nearest_codes(y * repeat_columns(inverse, 16)))
    offsets = rows[:, None].to(tl.int64) * (N // 2) + pairs[None, :]
    tl.store(out + offsets, packed, mask=(rows < M)[:, None] & (pairs < N // 2)[None, :])


@triton.jit
def rms_norm(
    x,  # (M, N)
    weight,  # (N,)
    global_scale,  # (1,) float32, read for nvfp4
    out,  # (M, N) of x's type or float8, or (M, N / 2) bytes of codes
    scale,  # (ceil(N / 128), M) float32 for fp8, (M, N / 16) bytes for nvfp4
    residual,  # (M, N), read and written with RESIDUAL
    M, N, eps,
    OUT_FORMAT: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program; COLS is a power of two, and no less than N."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    offsets = rows[:, None].to(tl.int64) * N + cols[None, :]
    h = tl.load(x + offsets, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if RESIDUAL:
        h += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(residual.dtype.element_ty)
        tl.store(residual + offsets, rounded, mask=inside)
        h = rounded.to(tl.float32)
    y = normalize(h, weight, cols, cols < N, N, eps)
    if OUT_FORMAT == "same":
        tl.store(out + offsets, y.to(out.dtype.element_ty), mask=inside)
    elif OUT_FORMAT == "fp8":
        store_fp8(y, rows, cols, inside, out, scale, M, N, COLS)
    else:
        store_nvfp4(y, rows, global_scale, out, scale, M, N, COLS)
