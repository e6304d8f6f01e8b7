"""What follows the product: D = activation(z) + residual, z = A @ B^T + bias.

All in float32, rounded once by the store. "swiglu" halves the columns: column 2j of z is the gate
of column 2j + 1. bias is (N,); residual and D are (M, N), or (M, N // 2) for swiglu, row-major.
"""

import triton
import triton.language as tl


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """activation(z) of a tile z (rows, cols)."""
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
    """Columns of D that ``cols`` columns of the product become; also maps a first column."""
    return cols // 2 if ACTIVATION == "swiglu" else cols


@triton.jit
def window(tile, row, col, M, N):
    """Offsets of a tile's elements in an (M, N) matrix, and which of them lie inside it.

    Offsets are 64-bit: D of a vocabulary projection has more than 2^31 bytes.
    """
    rows, cols = row + tl.arange(0, tile.shape[0]), col + tl.arange(0, tile.shape[1])
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    return rows[:, None].to(tl.int64) * N + cols[None, :], inside


@triton.jit
def finish(
    z, bias, residual, d, row, col, M, N,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Write to D what comes of z, the tile of A @ B^T at (row, col).

    residual and d are descriptors where DESCRIBED, else pointers.
    """
    if HAS_BIAS:
        cols = col + tl.arange(0, z.shape[1])
        z += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tile = activate(z, ACTIVATION)
    d_col, d_N = d_cols(col, ACTIVATION), d_cols(N, ACTIVATION)
    if DESCRIBED:
        if HAS_RESIDUAL:
            tile += residual.load([row, d_col]).to(tl.float32)
        d.store([row, d_col], tile.to(d.dtype))
    else:
        offsets, inside = window(tile, row, d_col, M, d_N)
        if HAS_RESIDUAL:
            tile += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(d + offsets, tile.to(d.dtype.element_ty), inside)
