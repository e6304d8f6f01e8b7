"""The readers of `Product`: from accumulators in tensor memory to rows of the result."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.tensor_memory import COLUMNS, ROWS
from kernelcat.kernels.cute.moe_gemm.blackwell.scales import BLOCK, SLOTS

FIRST_READER_WARP = 8
"""The first warp of the second warpgroup that reads."""


class Reader:
    """A base class of `Product`; uses its ``tiles``, ``row_scales``, ``output`` and sizes.

    Each of ``reader_groups`` warpgroups reads ``reader_columns`` columns of an accumulator, which
    are rows of A, and each of its threads one row, which is a row of the weights.
    """

    @cute.jit
    def read(
        self,
        lists: tuple,  # of ``ExpertTiles``
        parts: tuple,  # of ``read_columns``
        mSW: cute.Tensor,  # (k-blocks, n / 128, experts), with fp8
        mSA: cute.Tensor,  # (1, a_rows, k-blocks)
        sSA: cute.Tensor,  # (1, block_m, SLOTS)
        mBias: cute.Tensor,  # (n, experts)
        mOrder: cute.Tensor,  # (rows,)
        mOut: cute.Tensor,  # (width, columns / width, rows)
        reader: pipeline.PipelineConsumer,
        n: Int32,
        k: Int32,
        top_k: Int32,
    ):
        """The readers: from accumulators of all tiles of this thread block to the result."""
        num_tiles, num_tiles_n = self.tiles.count(lists[1], n)
        num_k_blocks, expert = self.num_k_blocks(k), Int32(0)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        w_row = cute.arch.thread_idx()[0] % ROWS
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // FIRST_READER_WARP
        thread, first_column = group * ROWS + w_row, group * self.reader_columns
        if cutlass.const_expr(self.clear):
            served = lists[0][self.tiles.experts]  # rows; later ones have no assignment
            self.output.clear(mOut, served + first, step, thread, self.readers)
        sums = cute.make_rmem_tensor(self.reader_columns, Float32)
        for index in cutlass.range(first, num_tiles, step, unroll=1):
            expert, row, num_rows, col = self.tiles.find(index, expert, num_tiles_n, *lists)
            bias = self.output.bias_of(mBias, expert, col + w_row)
            if cutlass.const_expr(self.is_promoted):
                a_row = row + cutlass.min(thread, num_rows - 1)
                if cutlass.const_expr(self.gather):
                    a_row = mOrder[a_row] // top_k
                gSA, w_scale = mSA[None, a_row, None], Float32(1)
                if cutlass.const_expr(not self.is_block_scaled):
                    w_scale = mSW[0, col // BLOCK, expert]
                sums.fill(0.0)
                self.row_scales.begin(gSA, sSA, thread)
                for k_idx in cutlass.range(num_k_blocks, unroll=1):
                    next_scale = Float32(1)
                    if cutlass.const_expr(not self.is_block_scaled):
                        ahead = cutlass.min(k_idx + 1, num_k_blocks - 1)
                        next_scale = mSW[ahead, col // BLOCK, expert]
                    self.row_scales.next(gSA, sSA, k_idx, thread)
                    accumulator = reader.wait_and_advance()
                    scales = sSA[0, None, k_idx % SLOTS]
                    self.add(parts, accumulator, first_column, scales, w_scale, sums)
                    w_scale = next_scale
            else:
                accumulator = reader.wait_and_advance()
                self.add(parts, accumulator, first_column, None, Float32(1), sums)
            row, num_rows = row + first_column, num_rows - first_column
            self.output.store(sums, bias, mOut, row, num_rows, col + w_row, n)

    @cute.jit
    def add(
        self,
        parts: tuple,  # of ``read_columns``
        accumulator,  # its handle
        first_column: Int32,
        scales: cute.Tensor | None,  # (block_m,) in shared memory, or None to replace the sums
        w_scale: Float32,
        sums: cute.Tensor,  # (reader_columns,)
    ):
        """Adds this thread's columns of an accumulator, scaled, to the sums, and releases it."""
        tiled_copy, tDtC, _, columns = parts
        num_parts = self.reader_columns // COLUMNS
        first = (accumulator.index * self.block_m + first_column) // COLUMNS
        for i in cutlass.range_constexpr(num_parts):
            cute.copy(tiled_copy, tDtC[None, None, first + i], columns)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(i == num_parts - 1):
                accumulator.release()
            for j in cutlass.range_constexpr(COLUMNS):
                column = i * COLUMNS + j
                if cutlass.const_expr(scales is None):
                    sums[column] = columns[j]
                elif cutlass.const_expr(self.is_block_scaled):
                    sums[column] += scales[first_column + column] * columns[j]
                else:
                    scale = scales[first_column + column] * w_scale
                    sums[column] += scale * columns[j]
