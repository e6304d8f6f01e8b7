"""Triton kernels of `out_router`; the arrays are those of reference/out_router.py."""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.dependent_launch import await_previous
from kernelcat.kernels.triton.common.device.pointer_product import pointer_product
from kernelcat.kernels.triton.common.device.split_k import sum_splits_at_once


@triton.jit
def multiply(a, b, rows, num_rows, size, BLOCK_K: tl.constexpr):
    """Products of row ``a`` (size,) and rows ``rows`` of ``b`` (num_rows, size), in float32."""
    sums = tl.zeros(rows.shape, tl.float32)
    for k in range(0, size, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        left = tl.load(a + columns, mask=columns < size, other=0.0).to(tl.float32)
        inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
        places = rows.to(tl.int64)[:, None] * size + columns[None, :]
        sums += tl.sum(
            tl.load(b + places, mask=inside, other=0.0).to(tl.float32) * left[None, :], 1
        )
    return sums


@triton.jit
def project(
    attn,  # (tokens, width)
    wo,  # (hidden, width)
    bo,  # (hidden,), where BIAS
    residual,  # (tokens, hidden)
    width, hidden, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N elements of one token's h a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < hidden
    h = multiply(attn + token * width, wo, columns, hidden, width, BLOCK_K)
    if BIAS:
        h += tl.load(bo + columns, mask=inside, other=0.0).to(tl.float32)
    places = residual + token * hidden + columns
    tl.store(places, tl.load(places, mask=inside, other=0.0).to(tl.float32) + h, mask=inside)


@triton.jit
def normalize(
    residual,  # (tokens, hidden)
    norm_weight,  # (hidden,)
    x,  # (tokens, hidden)
    hidden, eps, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row of x a program."""
    row = tl.program_id(0).to(tl.int64) * hidden
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(0, hidden, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        h = tl.load(residual + row + columns, mask=columns < hidden, other=0.0).to(tl.float32)
        squares += h * h
    root = tl.sqrt(tl.sum(squares, 0) / hidden + eps)
    for k in range(0, hidden, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        inside = columns < hidden
        h = tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row + columns, h / root * factor, mask=inside)


@triton.jit
def route(
    x,  # (tokens, hidden)
    router,  # (experts, hidden)
    router_bias,  # (experts,), where BIAS
    logits,  # (tokens, experts) float32
    hidden, experts, BIAS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_E logits of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    sums = multiply(x + token * hidden, router, rows, experts, hidden, BLOCK_K)
    if BIAS:
        sums += tl.load(router_bias + rows, mask=rows < experts, other=0.0).to(tl.float32)
    tl.store(logits + token * experts + rows, sums, mask=rows < experts)


@triton.jit
def project_tile(
    attn, wo, bo, residual,
    squares,  # (tiles of BLOCK_N columns, tokens) float32
    partials, arrivals, tokens, width, hidden, split_depth,
    BIAS: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of h for BLOCK_T tokens, and the sums of their squares for each token.

    The product is transposed: rows of wo fill the 64 rows of a warpgroup's product, which few
    tokens would leave mostly empty. Program axis 1 splits the columns of attn.
    """
    tile, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = split * split_depth
    end = min(width, begin + split_depth)
    await_previous(DEPENDENT)
    acc = pointer_product(
        wo, attn, tile * BLOCK_N, group * BLOCK_T, begin, end, hidden, tokens, width,
        BLOCK_N, BLOCK_T, BLOCK_K,
    )  # fmt: skip
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ts = (group * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    place = group * tl.num_programs(0) + tile
    acc, is_last = sum_splits_at_once(acc, partials, arrivals, place, split, SPLIT_K, PARTS)
    if is_last:
        inside = (columns < hidden)[:, None] & (ts < tokens)[None, :]
        if BIAS:
            acc += tl.load(bo + columns, mask=columns < hidden, other=0.0).to(tl.float32)[:, None]
        elements = residual + ts[None, :] * hidden + columns[:, None]
        acc += tl.load(elements, mask=inside, other=0.0).to(tl.float32)
        h = tl.where(inside, acc, 0.0).to(residual.dtype.element_ty)
        tl.store(elements, h, mask=inside)
        h = h.to(tl.float32)
        tl.store(squares + tile.to(tl.int64) * tokens + ts, tl.sum(h * h, 0), mask=ts < tokens)


@triton.jit
def route_tile(
    residual, norm_weight, router, router_bias,
    squares,  # (num_squares, tokens) float32
    x, logits, partials, arrivals, tokens, hidden, experts, num_squares, eps,
    HAS_ROUTER: tl.constexpr, BIAS: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_K columns of x for BLOCK_T tokens, and their part of BLOCK_E logits of each token.

    Program axis 0 splits the columns; programs of axis 1 have different experts, and the first of
    them stores x.
    """
    split, tile, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = split * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    ts = (group * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    factor = tl.load(norm_weight + columns, mask=columns < hidden, other=0.0).to(tl.float32)
    if HAS_ROUTER:
        is_weight = (rows < experts)[:, None] & (columns < hidden)[None, :]
        weight_places = router + rows.to(tl.int64)[:, None] * hidden + columns[None, :]
        weights = tl.load(weight_places, mask=is_weight, other=0.0)
    await_previous(DEPENDENT)
    inside = (ts < tokens)[:, None] & (columns < hidden)[None, :]
    elements = ts[:, None] * hidden + columns[None, :]
    h = tl.load(residual + elements, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, num_squares, BLOCK_S):
        tiles = first + tl.arange(0, BLOCK_S)
        is_square = (tiles < num_squares)[:, None] & (ts < tokens)[None, :]
        places = squares + tiles.to(tl.int64)[:, None] * tokens + ts[None, :]
        total += tl.sum(tl.load(places, mask=is_square, other=0.0), 0)
    scale = 1.0 / tl.sqrt(total / tl.maximum(hidden, 1) + eps)
    y = (h * scale[:, None] * factor[None, :]).to(x.dtype.element_ty)
    if tile == 0:
        tl.store(x + elements, y, mask=inside)
    if HAS_ROUTER:
        acc = tl.dot(weights, y.T)
        place = group * tl.num_programs(1) + tile
        acc, is_last = sum_splits_at_once(acc, partials, arrivals, place, split, SPLIT_K, PARTS)
        if is_last:
            if BIAS:
                bias = tl.load(router_bias + rows, mask=rows < experts, other=0.0)
                acc += bias.to(tl.float32)[:, None]
            is_logit = (rows < experts)[:, None] & (ts < tokens)[None, :]
            tl.store(logits + ts[None, :] * experts + rows[:, None], acc, mask=is_logit)
