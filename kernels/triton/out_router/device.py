"""Triton kernels of `out_router`; the arrays are those of reference/out_router.py."""

import triton
import triton.language as tl


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
