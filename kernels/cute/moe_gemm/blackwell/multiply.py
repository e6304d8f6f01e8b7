"""The MMA warp of `Product`."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from kernelcat.kernels.cute.moe_gemm.blackwell.scales import (
    BLOCK,
    BlockScales,
    beside,
    copy_ones,
    copy_stage,
)

MMA_K = 32
"""Columns of a product of elements of 8 bits."""


class Multiplier:
    """A base class of `Product`; uses its ``tiles``, ``k_tail`` and kind of products."""

    @cute.jit
    def multiply(
        self,
        lists: tuple,  # of ``ExpertTiles``
        tiled_mma: cute.TiledMma,
        tCrW: cute.Tensor,  # (MMA, MMA_M, MMA_K, stages)
        tCrA: cute.Tensor,  # (MMA, MMA_N, MMA_K, stages)
        tCtAcc: cute.Tensor,  # (MMA, MMA_M, MMA_N, accumulators)
        scales: BlockScales | None,
        consumer: pipeline.PipelineConsumer,
        scale_consumer: pipeline.PipelineConsumer | None,
        issuer: pipeline.PipelineProducer,
        n: Int32,
        k: Int32,
    ):
        """The MMA warp: products of all tiles of this thread block."""
        num_k_blocks = self.num_k_blocks(k)
        num_tiles, _ = self.tiles.count(lists[1], n)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if cutlass.const_expr(self.is_block_scaled):
            copy_ones(scales)
        for _ in cutlass.range(first, num_tiles, step, unroll=1):
            if cutlass.const_expr(not self.is_promoted):
                of_tile = issuer.acquire_and_advance()
            for k_idx in cutlass.range(num_k_blocks, unroll=1):
                if cutlass.const_expr(self.is_promoted):
                    of_block = issuer.acquire_and_advance()
                accumulator = of_block if cutlass.const_expr(self.is_promoted) else of_tile
                tCtTile = tCtAcc[None, None, None, accumulator.index]
                stage = consumer.wait_and_advance()
                if cutlass.const_expr(self.is_block_scaled):
                    # Products and copies to tensor memory run in the order of their issue.
                    scale_stage = scale_consumer.wait_and_advance()
                    copy_stage(scales, scale_stage.index)
                    scale_stage.release()
                known = self.known_products(k_idx, num_k_blocks)
                for block in cutlass.range_constexpr(cute.size(tCrW, mode=[2])):
                    is_first = block == known
                    if cutlass.const_expr(not self.is_promoted and block == 0):
                        is_first = k_idx == 0
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, not is_first)
                    at = (None, None, block, stage.index)
                    w, a = tCrW[at], tCrA[at]
                    if cutlass.const_expr(self.is_block_scaled):
                        w, a = beside(scales, w, a, block)
                    if block >= known:
                        cute.gemm(tiled_mma, tCtTile, w, a, tCtTile)
                stage.release()
                if cutlass.const_expr(self.is_promoted):
                    of_block.commit()
            if cutlass.const_expr(not self.is_promoted):
                of_tile.commit()
        issuer.tail()

    @cute.jit
    def known_products(self, k_idx: Int32, num_k_blocks: Int32):
        """How many products of a k-block the k-block before has computed: those they share."""
        known = 0
        if cutlass.const_expr(self.k_tail):
            known = Int32(0)
            if k_idx == num_k_blocks - 1:
                known = Int32((BLOCK - self.k_tail) // MMA_K)
        return known
