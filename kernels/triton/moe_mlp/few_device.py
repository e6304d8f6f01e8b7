"""Triton kernels of `moe_mlp` for few tokens: weights are read once for all tokens of an expert.

    x, residual, out (tokens, hidden); ids, gates (tokens, top_k)
    h (tokens * top_k, inter), of x's type
    y (SPLITS, tokens * top_k, hidden) float32, where each split has a part of W2's columns
    arrivals (blocks of columns of out,) int32, zero before and after
    w, w_scale, global_scale, bias: see common/device/experts.py

N and K are rows and columns of an expert's weights. A program has BLOCK_N rows of the weights of
one assignment's expert. If an earlier assignment has the same expert, there is nothing to multiply:
the program of the expert's first assignment multiplies the rows with all tokens of the expert. The
tokens are the columns of the product; columns of other tokens are zero.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.experts import (
    activate,
    add_bias,
    finish_sums,
    load_block_scales,
    load_weights,
)
from kernelcat.kernels.triton.common.device.fp8 import quantize_rows


@triton.jit
def find_rows(ids, assignment, tokens, top_k, BLOCK_T: tl.constexpr, SLOTS: tl.constexpr):
    """The expert of an assignment, its assignments, and whether the assignment is their first.

    The expert's assignments are (BLOCK_T,): that of each token, or -1.
    """
    token, slot = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, SLOTS)[None, :]
    inside = (token < tokens) & (slot < top_k)
    assignments = token * top_k + slot
    expert = tl.load(ids + assignment)
    is_served = tl.load(ids + assignments, mask=inside, other=-1) == expert
    rows = tl.max(tl.where(is_served, assignments, -1), axis=1)
    first = tl.min(tl.where(rows >= 0, rows, tokens * top_k), axis=0)
    return expert, rows, first == assignment


@triton.jit
def multiply(
    a,  # (rows, K)
    sources,  # (BLOCK_T,): rows of A
    is_served,  # (BLOCK_T,): which of them are multiplied
    w, w_scale, expert, col, begin, end, N, K,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A[sources] @ W[col : col + BLOCK_N]^T over columns [begin, end): (BLOCK_T, BLOCK_N) float32.

    Weights are the left operand, which tensor cores can take from registers.
    """
    cols = col + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = tl.float8e4nv if QUANTIZED else a.dtype.element_ty
    rows = a + sources[:, None].to(tl.int64) * K
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        ks = k + tl.arange(0, BLOCK_K)
        inside = is_served[:, None] & (ks < K)[None, :]
        a_tile = tl.load(rows + ks[None, :], mask=inside, other=0.0)
        w_tile = load_weights(
            w, w_scale, expert, col, k, N, K, dtype, FORMAT, IN_TILES, BLOCK_N, BLOCK_K
        )
        if FORMAT == "fp8":
            scale = load_block_scales(w_scale, expert, cols, k, N, K)[:, None]
            if QUANTIZED:
                a_tile, a_scale = quantize_rows(a_tile.to(tl.float32), dtype)
                scale = scale * a_scale[None, :]
            acc += tl.dot(w_tile, a_tile.T) * scale
        else:
            acc = tl.dot(w_tile, a_tile.T, acc)
    return acc.T


@triton.jit
def first(
    x, w, w_scale, global_scale, bias, ids, h, tokens, top_k, N, K,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, QUANTIZED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, SLOTS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h = activation(x @ W1^T + bias1) for the tokens of an expert and BLOCK_N rows of W1."""
    await_previous(DEPENDENT)
    col, assignment = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    expert, rows, is_first = find_rows(ids, assignment, tokens, top_k, BLOCK_T, SLOTS)
    if is_first:
        z = multiply(
            x, tl.arange(0, BLOCK_T), rows >= 0, w, w_scale, expert, col, 0, K, N, K,
            FORMAT, IN_TILES, QUANTIZED, BLOCK_T, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        z = finish_sums(z, global_scale, bias, expert, col, N, FORMAT, HAS_BIAS)
        cols = col // 2 + tl.arange(0, BLOCK_N // 2)
        places = rows[:, None].to(tl.int64) * (N // 2) + cols[None, :]
        inside = (rows >= 0)[:, None] & (cols < N // 2)[None, :]
        tl.store(h + places, activate(z, ACTIVATION).to(h.dtype.element_ty), mask=inside)


@triton.jit
def combine(
    y, gates, residual, out, cols, tokens, top_k, N,
    HAS_RESIDUAL: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Columns ``cols`` of out for all tokens."""
    token, num_rows = tl.arange(0, BLOCK_T), tokens * top_k
    inside = (token < tokens)[:, None] & (cols < N)[None, :]
    places = token[:, None].to(tl.int64) * N + cols[None, :]
    total = tl.zeros((BLOCK_T, cols.shape[0]), tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    for slot in range(top_k):
        rows = token * top_k + slot
        gate = tl.load(gates + rows, mask=token < tokens, other=0.0)
        for split in tl.static_range(SPLITS):
            row_places = (split * num_rows + rows)[:, None].to(tl.int64) * N + cols[None, :]
            total += gate[:, None] * tl.load(
                y + row_places, mask=inside, other=0.0, cache_modifier=".cg"
            )
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def second(
    h, w, w_scale, global_scale, bias, ids, gates, residual, y, arrivals, out,
    tokens, depth, top_k, N, K,
    FORMAT: tl.constexpr, IN_TILES: tl.constexpr, QUANTIZED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, SLOTS: tl.constexpr, DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = h @ W2^T + bias2, and out = residual + the sum over slots, in order, of gates * y.

    Each split has ``depth`` columns of W2. Of the programs that have a block of columns of out, the
    last one to finish computes the sums.
    """
    # ids are older than the launch before this one, which waited for them.
    col, assignment, split = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    expert, rows, is_first = find_rows(ids, assignment, tokens, top_k, BLOCK_T, SLOTS)
    await_previous(DEPENDENT)
    num_rows = tokens * top_k
    cols = col + tl.arange(0, BLOCK_N)
    if is_first:
        begin = split * depth
        z = multiply(
            h, rows, rows >= 0, w, w_scale, expert, col, begin, tl.minimum(begin + depth, K), N, K,
            FORMAT, IN_TILES, QUANTIZED, BLOCK_T, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        z = finish_sums(z, global_scale, bias, expert, col, N, FORMAT, False)
        if HAS_BIAS and split == 0:
            z = add_bias(z, bias, expert, col, N)
        places = (split * num_rows + rows)[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(y + places, z, mask=(rows >= 0)[:, None] & (cols < N)[None, :])
    tl.debug_barrier()  # all threads store before one thread counts
    num_arrivals = tl.num_programs(1) * SPLITS
    block = tl.program_id(0)
    if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == num_arrivals - 1:
        tl.store(arrivals + block, 0)
        combine(y, gates, residual, out, cols, tokens, top_k, N, HAS_RESIDUAL, SPLITS, BLOCK_T)
