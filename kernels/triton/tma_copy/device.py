"""Triton kernels of `tma_copy`: dst = src, rows x cols, rows src_stride and dst_stride apart."""

import triton
import triton.language as tl


@triton.jit
def vectorized(
    src, dst, rows, cols, src_stride, dst_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A tile a program, through registers.

    The mask of whole vectors of VECTOR elements changes only at their borders, which lets the
    compiler use wide accesses; the few elements behind the last one go one by one.
    """
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    first = tl.program_id(0).to(tl.int64) * BLOCK_COLS
    col = first + tl.arange(0, BLOCK_COLS)[None, :]
    src += row * src_stride
    dst += row * dst_stride
    whole = cols // VECTOR * VECTOR
    inside = (row < rows) & (col < whole)
    tl.store(dst + col, tl.load(src + col, inside, eviction_policy="evict_first"), inside)
    if (whole < cols) & (first + BLOCK_COLS >= cols):
        last = whole + tl.arange(0, VECTOR)[None, :]
        rest = (row < rows) & (last < cols)
        tl.store(dst + last, tl.load(src + last, rest), rest)


@triton.jit
def tensor_map(
    src, dst, rows, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent: the copy engine brings STAGES tiles ahead and clips those at the edges."""
    across = tl.cdiv(cols, BLOCK_COLS)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * across
    for tile in tl.range(tl.program_id(0), tiles, NUM_PROGRAMS, num_stages=STAGES):
        at = [tile // across * BLOCK_ROWS, tile % across * BLOCK_COLS]
        dst.store(at, src.load(at))
