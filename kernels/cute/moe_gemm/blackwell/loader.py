"""The producer warps of `Product`: operands of all tiles by TMA, block scales by a warp's lanes."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32

from kernelcat.kernels.cute.common.scale_atoms import ATOM_COLUMNS
from kernelcat.kernels.cute.moe_gemm.blackwell.operands import GatheredRows, Rows, load, tiles_of
from kernelcat.kernels.cute.moe_gemm.blackwell.scales import BLOCK, load_words


class Loader:
    """A base class of `Product`; uses its ``tiles``, ``gather``, ``k_tail`` and sizes."""

    @cute.jit
    def produce(
        self,
        lists: tuple,  # of ``ExpertTiles``
        w: Rows,
        tail: Rows,
        a: Rows | GatheredRows,
        mOrder: cute.Tensor,  # (rows,)
        sIndices: cute.Tensor,  # (block_m,)
        producer: pipeline.PipelineProducer,
        n: Int32,
        k: Int32,
        top_k: Int32,
    ):
        """The load warp: operands of all tiles of this thread block."""
        num_tiles, num_tiles_n = self.tiles.count(lists[1], n)
        num_full_blocks = self.num_k_blocks(k) - (1 if self.k_tail else 0)
        expert = Int32(0)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for index in cutlass.range(first, num_tiles, step, unroll=1):
            expert, row, num_rows, col = self.tiles.find(index, expert, num_tiles_n, *lists)
            if cutlass.const_expr(self.gather):
                self.find_rows(mOrder, sIndices, row, num_rows, top_k)
            w_row = expert * n + col
            w_tiles, a_tiles = tiles_of(w, w_row, 0), tiles_of(a, row, 0)
            for k_idx in cutlass.range(num_full_blocks, unroll=1):
                stage = producer.acquire_and_advance()
                load(w, w_tiles, k_idx, stage)
                load(a, a_tiles, k_idx, stage)
            if cutlass.const_expr(self.k_tail):
                stage = producer.acquire_and_advance()
                load(tail, tiles_of(tail, w_row, 0), 0, stage)
                load(a, tiles_of(a, row, k - BLOCK), 0, stage)
        # A thread block must not exit while products that read its stages may be running.
        producer.tail()

    @cute.jit
    def find_rows(
        self,
        mOrder: cute.Tensor,  # (rows,)
        sIndices: cute.Tensor,  # (block_m,), written
        row: Int32,
        num_rows: Int32,
        top_k: Int32,
    ):
        """Writes the tokens of a tile's rows; behind them -1, no row of A, which TMA zeroes."""
        cute.arch.sync_warp()  # the loads of the tile before have been issued
        for i in cutlass.range_constexpr(0, self.block_m, 32):
            tile_row = i + cute.arch.lane_idx()
            token = Int32(-1)
            if tile_row < num_rows:
                token = mOrder[row + tile_row] // top_k
            sIndices[tile_row] = token
        cute.arch.sync_warp()

    @cute.jit
    def load_scales(
        self,
        lists: tuple,  # of ``ExpertTiles``
        mSW: cute.Tensor,  # (parts, parts along K, experts * n)
        sWords: cute.Tensor,  # (ATOM_COLUMNS, lanes, stages)
        producer: pipeline.PipelineProducer,
        n: Int32,
        k: Int32,
    ):
        """The scale warp: block scales of the weights, read one k-block ahead."""
        num_tiles, num_tiles_n = self.tiles.count(lists[1], n)
        num_k_blocks = self.num_k_blocks(k)
        num_parts = cute.size(mSW, mode=[0])
        last_part = mSW.shape[1] - num_parts
        expert, lane = Int32(0), cute.arch.lane_idx()
        words = cute.make_rmem_tensor(ATOM_COLUMNS, Uint32)
        stored = cute.make_rmem_tensor(ATOM_COLUMNS, Uint32)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for index in cutlass.range(first, num_tiles, step, unroll=1):
            expert, _, _, col = self.tiles.find(index, expert, num_tiles_n, *lists)
            row, last_row = expert * n + col, expert * n + n - 1
            load_words(mSW, row, last_row, Int32(0), words)
            for k_idx in cutlass.range(num_k_blocks, unroll=1):
                cute.autovec_copy(words, stored)
                part = cutlass.min((k_idx + 1) * num_parts, last_part)
                load_words(mSW, row, last_row, part, words)
                stage = producer.acquire_and_advance()
                cute.autovec_copy(stored, sWords[None, lane, stage.index])
                cute.arch.fence_proxy("async.shared", space="cta")
                stage.commit()
        producer.tail()
