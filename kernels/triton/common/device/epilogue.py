"""What follows the product: D = activation(z) + residual, z = A @ B^T + bias.

All in float32, rounded once by the store. "swiglu" halves the columns: column 2j of z is the gate
of column 2j + 1. z is (M, N), bias (N,); residual and D are (M, N), or (M, N // 2) for swiglu, with
contiguous rows.
"""

import triton
import triton.language as tl


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """activation(z) of a tile z (rows, cols); (rows, cols // 2) for swiglu."""
    if ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "swiglu":
        gate, up = tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))
        z = gate / (1.0 + tl.exp(-gate)) * up
    return z


@triton.jit
def d_cols(cols, ACTIVATION: tl.constexpr):
    """Columns of D that come of the first ``cols`` columns of z."""
    return cols // 2 if ACTIVATION == "swiglu" else cols


@triton.jit
def locate_elements(tile, row, col, M, N):
    """Offsets of the elements of a tile at (row, col) of a matrix (M, N), and which lie inside.

    Offsets have 64 bits: D of a vocabulary projection has more than 2^31 bytes.
    """
    rows, cols = row + tl.arange(0, tile.shape[0]), col + tl.arange(0, tile.shape[1])
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    return rows[:, None].to(tl.int64) * N + cols[None, :], inside


@triton.jit
def finish_tile(
    z, bias, residual, d, row, col, M, N,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TMA_STORE: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to z (rows, cols), the tile of A @ B^T at (row, col), and store to D.

    residual and d are descriptors where TMA_STORE, else pointers.
    """
    if HAS_BIAS:
        cols = col + tl.arange(0, z.shape[1])
        z += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tile = activate(z, ACTIVATION)
    d_col, d_N = d_cols(col, ACTIVATION), d_cols(N, ACTIVATION)
    if TMA_STORE:
        if HAS_RESIDUAL:
            tile += residual.load([row, d_col]).to(tl.float32)
        d.store([row, d_col], tile.to(d.dtype))
    else:
        offsets, inside = locate_elements(tile, row, d_col, M, d_N)
        if HAS_RESIDUAL:
            tile += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(d + offsets, tile.to(d.dtype.element_ty), inside)
