"""Weights of experts in every format, and the activations of expert layers.

reference/_experts.py defines both. FORMAT is the format of the weights; w is (experts, N, K), or
bytes (experts, N, K / 2) of 4-bit codes, in rows or IN_TILES.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp4_weights import load_rows, load_tiles


@triton.jit
def load_weights(
    w, w_scale, expert, cols, k, N, K, dtype: tl.constexpr,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows ``cols`` of an expert's weights at columns [k, k + BLOCK_K), zeros past the edges.

    4-bit codes are multiplied by their scales, float8 weights are not (see load_block_scales).
    """
    expert = expert.to(tl.int64)
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        if IN_TILES:
            elements = expert * (tl.cdiv(N, 16) * 16) * (tl.cdiv(K, 64) * 64)
            codes, scales = w + elements // 2, w_scale + elements // BLOCK
            return load_tiles(codes, scales, cols, k, N, K, dtype, FORMAT == "nvfp4", BLOCK_K)
        else:
            codes, scales = w + expert * N * (K // 2), w_scale + expert * N * (K // BLOCK)
            return load_rows(codes, scales, cols, k, N, K, dtype, FORMAT == "nvfp4", False, BLOCK_K)
    else:
        ks = k + tl.arange(0, BLOCK_K)
        offsets = expert * N * K + cols[:, None].to(tl.int64) * K + ks[None, :]
        inside = (cols < N)[:, None] & (ks < K)[None, :]
        return tl.load(w + offsets, mask=inside, other=0.0).to(dtype)


@triton.jit
def load_block_scales(w_scale, expert, cols, k, N, K):
    """Scales of rows ``cols`` of an expert's float8 weights at column k."""
    num_k = tl.cdiv(K, 128)
    first = expert.to(tl.int64) * tl.cdiv(N, 128) * num_k + k // 128
    return tl.load(w_scale + first + cols // 128 * num_k, mask=cols < N, other=0.0)


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
