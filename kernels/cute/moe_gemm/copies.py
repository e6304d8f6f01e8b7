"""What a producer warpgroup copies by cp.async: gathered rows of A, and scales of float8."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernelcat.kernels.cute.common.block_scales import load_group_scales

WARPGROUP = 128
VECTOR_BYTES = 16
ROW_VECTORS = 8
"""Vectors of 16 bytes in a row of a stage: neighbouring lanes copy the vectors of a row."""
PASS_ROWS = WARPGROUP // ROW_VECTORS
"""Rows that the warpgroup copies at once."""


@cute.jit
def row_of_a(
    row: Int32,
    mOrder: cute.Tensor,  # (rows,)
    top_k: Int32,
    gather: cutlass.Constexpr[bool],
):
    """The row of A for row ``row`` of all experts' rows: with ``gather`` the row's token."""
    if cutlass.const_expr(gather):
        row = mOrder[row] // top_k
    return row


class GatheredRows:
    """Rows of A, wherever they lie, in the 128-byte swizzle of TMA and WGMMA."""

    def __init__(self, dtype: type, block_m: int, num_stages: int):
        self.dtype, self.block_m, self.num_stages = dtype, block_m, num_stages
        self.vector = VECTOR_BYTES * 8 // dtype.width
        self.num_passes = block_m // PASS_ROWS

    def layout(self, rows, k):
        """A in vectors: ((vector, 1), vectors, rows)."""
        stride = cute.assume(Int64(k), divby=self.vector)
        vectors = ((self.vector, 1), k // self.vector, rows)
        return cute.make_layout(vectors, stride=((1, 0), self.vector, stride))

    def shared_vectors(self, memory):
        """((vector, 1), ROW_VECTORS, block_m, stages): vector c of row r is at c ^ (r % 8)."""
        row = self.vector * ROW_VECTORS
        shape = ((self.vector, 1), ROW_VECTORS, self.block_m, self.num_stages)
        stride = ((1, 0), self.vector, row, row * self.block_m)
        return cute.make_tensor(memory, cute.make_layout(shape, stride=stride))

    @cute.jit
    def find(
        self,
        rows: cute.Tensor,  # (num_passes,), written: rows of A
        mOrder: cute.Tensor,  # (rows,)
        top_k: Int32,
        row: Int32,  # of the tile
        num_rows: Int32,  # of the tile
    ):
        """Looks up the rows that this thread copies, one in each pass."""
        first = cute.arch.thread_idx()[0] % WARPGROUP // ROW_VECTORS
        for i in cutlass.range_constexpr(self.num_passes):
            at = first + i * PASS_ROWS
            rows[i] = 0
            if at < num_rows:
                rows[i] = row_of_a(row + at, mOrder, top_k, True)

    @cute.jit
    def copy(
        self,
        mA: cute.Tensor,  # ((vector, 1), vectors, rows of A)
        rows: cute.Tensor,  # (num_passes,)
        num_rows: Int32,
        k_idx: Int32,
        sVectors: cute.Tensor,  # ((vector, 1), ROW_VECTORS, block_m) of the stage
    ):
        """Starts copying this thread's vector of each of its rows; columns outside become zeros.

        Rows outside the expert keep what the stage holds: their products are not stored.
        """
        past_l1 = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(past_l1, self.dtype, num_bits_per_copy=128)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        first, chunk = thread // ROW_VECTORS, thread % ROW_VECTORS
        is_column = cute.make_rmem_tensor(1, Boolean)
        at = k_idx * ROW_VECTORS + chunk
        is_column[0] = at < mA.shape[1]
        at = cutlass.min(at, mA.shape[1] - 1)
        for i in cutlass.range_constexpr(self.num_passes):
            if first + i * PASS_ROWS < num_rows:
                target = sVectors[None, chunk ^ (first % 8), first + i * PASS_ROWS]
                cute.copy(atom, mA[None, at, rows[i]], target, pred=is_column)


class Scales:
    """Scales of float8 operands: one for each row of A, and each 128 rows of weights."""

    def __init__(self, block_m: int, group_rows: int, gather: bool):
        self.block_m, self.group_rows, self.gather = block_m, group_rows, gather
        self.count = -(-block_m // WARPGROUP)  # of rows of A that a thread copies

    @cute.jit
    def find(
        self,
        rows: cute.Tensor,  # (count,), written: rows of A
        mOrder: cute.Tensor,  # (rows,)
        top_k: Int32,
        row: Int32,  # of the tile
        num_rows: Int32,  # of the tile
    ):
        """Looks up the rows of A whose scales this thread copies; 0 outside the expert."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        for i in cutlass.range_constexpr(self.count):
            rows[i] = 0
            if thread + i * WARPGROUP < num_rows:
                rows[i] = row_of_a(row + thread + i * WARPGROUP, mOrder, top_k, self.gather)

    @cute.jit
    def copy(
        self,
        mSA: cute.Tensor,  # (1, rows of A) of the k-block
        mSW: cute.Tensor,  # (1, blocks of rows) of the expert and the k-block
        rows: cute.Tensor,  # (count,)
        col: Int32,  # of the tile
        sSA: cute.Tensor,  # (1, block_m) of the stage
        sSW: cute.Tensor,  # (1, groups) of the stage
    ):
        """Starts copying the scales of a k-block of a tile."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        for i in cutlass.range_constexpr(self.count):
            at = thread + i * WARPGROUP
            if at < self.block_m:
                cute.copy(atom, mSA[None, rows[i]], sSA[None, at])
        if thread < 32:
            load_group_scales(mSW, sSW, col, self.group_rows)
