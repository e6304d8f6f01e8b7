"""Triton kernels of `fp8_swiglu`: x -> q float8_e4m3fn, scale float32.

x (M, N) has gates in even columns, and in odd columns the values that are gated; q is (M, N/2),
scale (ceil(N/256), M).
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.fp8 import clamp_amax, inverse_of, scale_of


@triton.jit
def silu_and_mul(gate, up):
    """silu(gate) * up in float32, both of one shape. exp takes four instructions more than exp2."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up  # -log2(e)


@triton.jit
def naive(x, q, scale, M, N):
    """The elements of one scale a program, which are in one row."""
    num_cols, num_blocks = N // 2, tl.cdiv(N, 256)
    row, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    cols = block * 128 + tl.arange(0, 128)
    inside = cols < num_cols
    pairs = x + row.to(tl.int64) * N + 2 * cols
    gate = tl.load(pairs, mask=inside, other=0.0)
    up = tl.load(pairs + 1, mask=inside, other=0.0)
    y = silu_and_mul(gate, up)
    amax = clamp_amax(tl.max(tl.abs(y), axis=0))
    block_scale, inverse = scale_of(amax), inverse_of(amax)
    tl.store(scale + block.to(tl.int64) * M + row, block_scale)
    target = q + row.to(tl.int64) * num_cols + cols
    tl.store(target, (y * inverse).to(q.dtype.element_ty), mask=inside)


@triton.jit
def fused(x, q, scale, M, N, ROWS: tl.constexpr, LANES: tl.constexpr):
    """ROWS rows of one column of blocks a program; the columns of a row follow one another.

    The tile is a list of vectors, (VECTORS, 8) of x and (VECTORS, 4) of q. A thread loads or stores
    one vector at once, so that Triton gives vectors to threads in order, and threads exchange
    nothing but maxima between load and store. The order: LANES adjacent vectors are of one row,
    then come the other rows, then the other of PARTS parts of the columns. Where threads are no
    more than ROWS x LANES, the same thread has all parts of its columns, and a maximum takes
    log2(LANES) shuffles.
    """
    PARTS: tl.constexpr = 32 // LANES
    VECTORS: tl.constexpr = PARTS * ROWS * LANES
    num_cols, num_blocks = N // 2, tl.cdiv(N, 256)
    row, block = tl.program_id(0) // num_blocks * ROWS, tl.program_id(0) % num_blocks
    index = tl.arange(0, VECTORS)
    vector = block * 32 + index // (ROWS * LANES) * LANES + index % LANES
    rows = (row + index // LANES % ROWS)[:, None]
    row_offset = rows.to(tl.int64)

    cols = (vector * 8)[:, None] + tl.arange(0, 8)[None, :]
    inside = (rows < M) & (cols < N)
    pairs = tl.load(x + row_offset * N + cols, inside, other=0.0, eviction_policy="evict_first")
    gate, up = tl.split(tl.reshape(pairs, (VECTORS, 4, 2)))
    y = silu_and_mul(gate, up)

    amax = tl.reshape(tl.max(tl.abs(y), axis=1), (PARTS, ROWS, LANES))
    row_amax = clamp_amax(tl.max(tl.max(amax, axis=0), axis=1))
    row_scale, inverse = scale_of(row_amax), inverse_of(row_amax)
    scale_rows = row + tl.arange(0, ROWS)
    tl.store(scale + block.to(tl.int64) * M + scale_rows, row_scale, mask=scale_rows < M)

    inverse = tl.broadcast_to(inverse[None, :, None], (PARTS, ROWS, LANES))
    quantized = (y * tl.reshape(inverse, (VECTORS, 1))).to(q.dtype.element_ty)
    cols = (vector * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(q + row_offset * num_cols + cols, quantized, (rows < M) & (cols < num_cols))
