"""Triton kernels of `tma_copy`: dst = src, both (rows, cols).

Rows begin src_stride and dst_stride elements apart; cols are contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def vectorized(
    src,  # (rows, cols)
    dst,  # (rows, cols)
    rows, cols, src_stride, dst_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Copy one tile a program, through registers.

    The mask covers whole vectors of VECTOR elements and is the same for all elements of a vector,
    so that the compiler can use wide accesses. The cols % VECTOR last elements of a row are copied
    one by one.
    """
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    first_col = tl.program_id(0).to(tl.int64) * BLOCK_COLS
    col = first_col + tl.arange(0, BLOCK_COLS)[None, :]
    src += row * src_stride
    dst += row * dst_stride
    vector_cols = cols // VECTOR * VECTOR
    inside = (row < rows) & (col < vector_cols)
    tl.store(dst + col, tl.load(src + col, inside, eviction_policy="evict_first"), inside)
    if (vector_cols < cols) & (first_col + BLOCK_COLS >= cols):
        tail_col = vector_cols + tl.arange(0, VECTOR)[None, :]
        tail_inside = (row < rows) & (tail_col < cols)
        tl.store(dst + tail_col, tl.load(src + tail_col, tail_inside), tail_inside)


@triton.jit
def tensor_map(
    src,  # descriptor of (rows, cols)
    dst,  # descriptor of (rows, cols)
    rows, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Copy tiles by TMA in persistent programs, with STAGES tiles in flight.

    TMA leaves out what lies beyond the edges of the matrices.
    """
    tiles_across = tl.cdiv(cols, BLOCK_COLS)
    num_tiles = tl.cdiv(rows, BLOCK_ROWS) * tiles_across
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_PROGRAMS, num_stages=STAGES):
        corner = [tile // tiles_across * BLOCK_ROWS, tile % tiles_across * BLOCK_COLS]
        dst.store(corner, src.load(corner))
