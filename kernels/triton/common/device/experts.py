"""Weights of experts in every format, and the activations of expert layers.

reference/_experts.py defines both. FORMAT is the format of the weights; w is (experts, N, K), or
4-bit codes (experts, N, K / 2): bytes in rows, or words IN_TILES (`load_register_tiles`). Scales
that are not float32 are bytes, or words IN_TILES.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4_tiles import load_register_tiles
from kernelcat.kernels.triton.common.device.fp4_weights import load_rows


@triton.jit
def load_weights(
    w, w_scale, expert, col, k, N, K, dtype: tl.constexpr,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows [col, col + BLOCK_N) of an expert's weights at columns [k, k + BLOCK_K).

    Zeros past the edges. 4-bit codes are multiplied by their scales, float8 weights are not (see
    load_block_scales).
    """
    expert, cols = expert.to(tl.int64), col + tl.arange(0, BLOCK_N)
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        NVFP4: tl.constexpr = FORMAT == "nvfp4"
        BLOCK: tl.constexpr = 16 if NVFP4 else 32
        if IN_TILES:
            elements = expert * (tl.cdiv(N, 16) * 16) * (tl.cdiv(K, 64) * 64)
            codes, scales = w + elements // 8, w_scale + elements // BLOCK // 4
            return load_register_tiles(
                codes, scales, col, k, N, K, dtype, NVFP4, BLOCK_N, BLOCK_K
            )  # fmt: skip
        else:
            codes, scales = w + expert * N * (K // 2), w_scale + expert * N * (K // BLOCK)
            return load_rows(codes, scales, cols, k, N, K, dtype, NVFP4, False, BLOCK_K)
    else:
        ks = k + tl.arange(0, BLOCK_K)
        offsets = expert * N * K + cols[:, None].to(tl.int64) * K + ks[None, :]
        inside = (cols < N)[:, None] & (ks < K)[None, :]
        return tl.load(w + offsets, mask=inside, other=0.0).to(dtype)


@triton.jit
def load_values(
    w, w_scale, expert, col, k, N, K, dtype: tl.constexpr,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As load_weights in float32, with all scales of blocks. 4-bit weights are rounded to dtype."""
    FP4: tl.constexpr = FORMAT == "mxfp4" or FORMAT == "nvfp4"
    rounded: tl.constexpr = dtype if FP4 else tl.float32
    values = load_weights(
        w, w_scale, expert, col, k, N, K, rounded, FORMAT, IN_TILES, BLOCK_N, BLOCK_K
    ).to(tl.float32)  # fmt: skip
    if FORMAT == "fp8":
        cols = col + tl.arange(0, BLOCK_N)
        values *= load_block_scales(w_scale, expert, cols, k, N, K)[:, None]
    return values


@triton.jit
def load_block_scales(w_scale, expert, cols, k, N, K):
    """Scales of rows ``cols`` of an expert's float8 weights at column k."""
    num_k = tl.cdiv(K, 128)
    first = expert.to(tl.int64) * tl.cdiv(N, 128) * num_k + k // 128
    return tl.load(w_scale + first + cols // 128 * num_k, mask=cols < N, other=0.0)


@triton.jit
def finish_sums(
    z, global_scale, bias, expert, col, N, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sums z (rows, cols) of columns ``col`` on, times the global scale, plus the bias."""
    if FORMAT == "nvfp4":
        z *= tl.load(global_scale + expert)
    if HAS_BIAS:
        z = add_bias(z, bias, expert, col, N)
    return z


@triton.jit
def add_bias(z, bias, expert, col, N):
    """z (rows, cols), columns ``col`` on, plus the expert's bias."""
    cols = col + tl.arange(0, z.shape[1])
    values = tl.load(bias + expert.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
    return z + values.to(tl.float32)[None, :]


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """activation(z) of a tile z (rows, cols); (rows, cols // 2) for both SwiGLU."""
    if ACTIVATION != "none":
        gate, up = tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))
        if ACTIVATION == "swiglu":
            z = gate / (1.0 + tl.exp(-gate)) * up
        else:
            gate = tl.where(gate > 7.0, 7.0, gate)
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
            z = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return z


@triton.jit
def result_cols(cols, ACTIVATION: tl.constexpr):
    """Columns of the result that come of the first ``cols`` columns of the product."""
    return cols if ACTIVATION == "none" else cols // 2
