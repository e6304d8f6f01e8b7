"""Scales of a stage: loaded into shared memory, read into registers, multiplied with a product.

``rows`` are rows of A, each with a scale of its own; ``groups`` are rows of B that share one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

BLOCK = 128
"""Rows of B that share a scale."""


@cute.jit
def load_row_scales(
    source: cute.Tensor,  # (1, m)
    target: cute.Tensor,  # (1, rows) in shared memory
    first: Int32,
):
    """Start copying the scales of rows of A from row ``first`` on; all lanes of a warp call this.

    Rows past the end get the last scale: their products are never stored.
    """
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    lane, rows, last = cute.arch.lane_idx(), cute.size(target), cute.size(source) - 1
    for i in cutlass.range_constexpr(0, rows, 32):
        if i + lane < rows:
            row = cutlass.min(first + i + lane, last)
            cute.copy(atom, source[None, row], target[None, i + lane])


@cute.jit
def load_group_scales(
    source: cute.Tensor,  # (1, n_blocks)
    target: cute.Tensor,  # (1, groups) in shared memory
    first: Int32,
    group_rows: cutlass.Constexpr[int],
):
    """Start copying the scales of groups of rows of B from row ``first`` on; a warp calls this.

    ``group_rows`` divides 128. Groups past the end get the last scale.
    """
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    lane, groups, last = cute.arch.lane_idx(), cute.size(target), cute.size(source) - 1
    if lane < groups:
        block = cutlass.min((first + lane * group_rows) // BLOCK, last)
        cute.copy(atom, source[None, block], target[None, lane])


@cute.jit
def read_scales(
    sRows: cute.Tensor,  # (rows,)
    sGroups: cute.Tensor,  # (groups,)
    tCcD: cute.Tensor,  # ((2, 2, block_n / 8), 1, 1): coordinates of a thread's sums in a wave
    first: cutlass.Constexpr[int],
    swap: cutlass.Constexpr[bool],
):
    """Read the scales of a thread's sums of the wave that begins in row ``first`` of the tile.

    Returns scales of A and of B. A's are (2,), for the two rows of the thread, or with ``swap``
    (2, block_n / 8), for its pairs of columns. B's are (groups,).
    """
    rGroups = cute.make_rmem_tensor(cute.size(sGroups), Float32)
    cute.autovec_copy(sGroups, rGroups)
    if cutlass.const_expr(swap):
        pairs = cute.size(tCcD) // 4
        rRows = cute.make_rmem_tensor((2, pairs), Float32)
        sPairs = cute.make_tensor(sRows.iterator, cute.make_layout((2, cute.size(sRows) // 2)))
        for j in cutlass.range_constexpr(pairs):
            pair = tCcD[(0, 0, j), 0, 0][1] // 2
            cute.autovec_copy(sPairs[None, pair], rRows[None, j])
    else:
        rRows = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(2):
            rRows[half] = sRows[first + tCcD[(0, half, 0), 0, 0][0]]
    return rRows, rGroups


@cute.jit
def promote(
    acc: cute.Tensor,  # ((2, 2, block_n / 8), 1, 1): a pair of columns, rows eight apart, pairs
    rRows: cute.Tensor,  # (2,), or (2, block_n / 8) with swap
    rGroups: cute.Tensor,  # (groups,)
    sums: cute.Tensor,  # like acc
    swap: cutlass.Constexpr[bool],
):
    """Add the scaled accumulators to the sums."""
    pairs, groups = cute.size(acc) // 4, cute.size(rGroups)
    if cutlass.const_expr(swap):
        for j in cutlass.range_constexpr(pairs):
            for c in cutlass.range_constexpr(2):
                scale = rRows[c, j] * rGroups[0]
                for half in cutlass.range_constexpr(2):
                    at = ((c, half, j), 0, 0)
                    sums[at] += scale * acc[at]
    else:
        scales = cute.make_rmem_tensor((2, groups), Float32)
        for half in cutlass.range_constexpr(2):
            for group in cutlass.range_constexpr(groups):
                scales[half, group] = rRows[half] * rGroups[group]
        for j in cutlass.range_constexpr(pairs):
            for half in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    at = ((c, half, j), 0, 0)
                    sums[at] += scales[half, j * groups // pairs] * acc[at]
