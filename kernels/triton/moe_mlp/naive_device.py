"""Triton kernels of `moe_mlp`: both products, a row and a block of columns a program.

    x, residual, out (tokens, hidden); h (tokens * top_k, inter); ids, gates (tokens, top_k)
    w, w_scale, global_scale, bias: see common/device/experts.py

N and K are rows and columns of an expert's weights.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.experts import activate, finish_sums, load_values
from kernelcat.kernels.triton.common.device.fp8 import quantize_rows


@triton.jit
def multiply_row(
    a,  # (K,), one row
    w, w_scale, global_scale, bias, expert, col, N, K,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, QUANTIZED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """a @ W^T + bias for rows [col, col + BLOCK_N) of an expert's weights: (1, BLOCK_N) float32."""
    dtype: tl.constexpr = tl.float32 if QUANTIZED else a.dtype.element_ty  # of decoded weights
    z = tl.zeros((1, BLOCK_N), tl.float32)
    for k in range(0, K, 128):
        ks = k + tl.arange(0, 128)[None, :]
        x = tl.load(a + ks, mask=ks < K, other=0.0).to(tl.float32)
        if QUANTIZED:
            codes, scale = quantize_rows(x, tl.float8e4nv)
            x = codes.to(tl.float32) * scale[:, None]
        values = load_values(
            w, w_scale, expert, col, k, N, K, dtype, FORMAT, IN_TILES, BLOCK_N, 128
        )
        z += tl.sum(values * x, axis=1)[None, :]
    return finish_sums(z, global_scale, bias, expert, col, N, FORMAT, HAS_BIAS)


@triton.jit
def first(
    x, w, w_scale, global_scale, bias, ids, h, top_k, N, K,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, QUANTIZED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h = activation(x @ W1^T + bias1) for an assignment and BLOCK_N rows of W1."""
    assignment, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    expert = tl.load(ids + assignment)
    z = multiply_row(
        x + assignment // top_k * K, w, w_scale, global_scale, bias, expert, col, N, K,
        FORMAT, IN_TILES, QUANTIZED, HAS_BIAS, BLOCK_N,
    )  # fmt: skip
    cols = col // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    result = activate(z, ACTIVATION).to(h.dtype.element_ty)
    tl.store(h + assignment * (N // 2) + cols, result, mask=cols < N // 2)


@triton.jit
def second(
    h, w, w_scale, global_scale, bias, ids, gates, residual, out, top_k, N, K,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, QUANTIZED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = residual + the sum over slots, in order, of gates * (h @ W2^T + bias2)."""
    token, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    place, inside = token * N + cols, cols < N
    total = tl.zeros((1, BLOCK_N), tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    for slot in range(top_k):
        assignment = token * top_k + slot
        expert = tl.load(ids + assignment)
        y = multiply_row(
            h + assignment * K, w, w_scale, global_scale, bias, expert, col, N, K,
            FORMAT, IN_TILES, QUANTIZED, HAS_BIAS, BLOCK_N,
        )  # fmt: skip
        total += tl.load(gates + assignment) * y
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
