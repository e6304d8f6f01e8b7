"""The main loop of `Split`: a thread block's rows against its tiles of tokens.

Tiles are copied by cp.async into a ring of stages, ``stages - 1`` tiles ahead of the products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import LOWEST


class Rows:
    """A base class of ``Split``, whose ``pages``, ``tile`` and ``partials`` it uses."""

    @cute.jit
    def attend(
        self,
        tiled_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        gQ: cute.Tensor,  # (head_dim, group_size, query tokens) of the key-value head
        mK: cute.Tensor,  # ((VECTOR, 1), 1, vectors)
        mV: cute.Tensor,  # as mK
        gTable: cute.Tensor,  # (table_width,)
        gKS: cute.Tensor,  # (pages,)
        gVS: cute.Tensor,  # (pages,)
        pages: cute.Tensor,  # (lookups, stages - 1): pages of the first tiles; overwritten
        sK: cute.Tensor,  # (block_n, width, stages)
        sV: cute.Tensor,
        sScale: cute.Tensor,  # (block_n, 2, stages)
        sQ: cute.Tensor,  # (8, MMA_K, threads)
        sO: cute.Tensor,  # (VECTOR, vectors + 1, block_m, warps_n), over keys and values
        kv_head: Int32,
        slot_vectors: Int32,
        group_size: Int32,
        first_position: Int32,  # of the sequence's query tokens
        row_begin: Int32,
        row_end: Int32,
        tile_begin: Int32,
        tile_step: Int32,
        num_tiles: Int32,
        end: Int32,
        window: Int32,
        scale: Float32,
        softcap: Float32,
    ):
        """Stores each warp's row max, row sum and sums of values in ``sO``."""
        tidx, _, _ = cute.arch.thread_idx()
        thr_copy = tiled_copy.get_slice(tidx)
        tKsK, tVsV = thr_copy.partition_D(sK), thr_copy.partition_D(sV)
        for stage in cutlass.range_constexpr(self.stages - 1):
            if stage < num_tiles:
                tile = tile_begin + stage * tile_step
                self.pages.load(
                    tiled_copy, mK, mV, tKsK[None, None, None, stage],
                    tVsV[None, None, None, stage], pages[None, stage], kv_head,
                    slot_vectors, tile, end, tidx,
                )  # fmt: skip
                if cutlass.const_expr(self.scales == "page"):
                    self.pages.load_scales(
                        gTable, gKS, gVS, sScale[None, None, stage], tile, end, tidx
                    )
            cute.arch.cp_async_commit_group()
        next_tile = tile_begin + (self.stages - 1) * tile_step
        self.pages.find(gTable, pages[None, 0], next_tile, tidx)

        # A grid of warps_m x warps_n warps: those with the same warp_n have the same tokens.
        column_threads = 32 * self.warps_m
        mma_tidx, warp_n = tidx % column_threads, tidx // column_threads
        thr_mma = tiled_mma.get_slice(mma_tidx)
        dim = self.head_dim
        tCcQ = thr_mma.partition_A(cute.make_identity_tensor((self.block_m, dim)))
        tScS = thr_mma.partition_C(cute.make_identity_tensor((self.block_m, self.tokens)))
        tCcO = thr_mma.partition_C(cute.make_identity_tensor((self.block_m, dim)))
        sQ = sQ[None, None, tidx]
        tSrQ = self.tile.load_query(tiled_mma, sQ, tCcQ, gQ, row_begin, row_end, group_size)
        out = cute.make_rmem_tensor(tCcO.shape, Float32)
        out.fill(0.0)
        num_rows = 2 * cute.size(out, mode=[1])
        row_max = cute.make_rmem_tensor(num_rows, Float32)
        row_sum = cute.make_rmem_tensor(num_rows, Float32)
        last_visible = cute.make_rmem_tensor(num_rows, Int32)
        row_max.fill(LOWEST)
        row_sum.fill(0.0)
        for i in cutlass.range_constexpr(num_rows):
            row = row_begin + tScS[(0, i % 2), i // 2, 0][0]
            last_visible[i] = first_position + cutlass.min(row, row_end - 1) // group_size
        first_limit = first_position + row_begin // group_size
        last_limit = first_position + (row_end - 1) // group_size

        for index in cutlass.range(num_tiles, unroll=1):
            # This tile has arrived, and all warps have read the stage that is filled next.
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.barrier()
            next_index = index + self.stages - 1
            if next_index < num_tiles:
                stage, tile = next_index % self.stages, tile_begin + next_index * tile_step
                self.pages.load(
                    tiled_copy, mK, mV, tKsK[None, None, None, stage],
                    tVsV[None, None, None, stage], pages[None, 0], kv_head,
                    slot_vectors, tile, end, tidx,
                )  # fmt: skip
                if cutlass.const_expr(self.scales == "page"):
                    self.pages.load_scales(
                        gTable, gKS, gVS, sScale[None, None, stage], tile, end, tidx
                    )
                self.pages.find(gTable, pages[None, 0], tile + tile_step, tidx)
            cute.arch.cp_async_commit_group()

            stage, token = index % self.stages, (tile_begin + index * tile_step) * self.block_n
            needs_mask = token + self.block_n > first_limit + 1
            if cutlass.const_expr(self.window):
                needs_mask = needs_mask or token <= last_limit - window
            warp_tile = (self.tokens, self.tile.width)
            keys = cute.local_tile(sK[None, None, stage], warp_tile, (warp_n, 0))
            values = cute.local_tile(sV[None, None, stage], warp_tile, (warp_n, 0))
            tile_scale = cute.local_tile(sScale[None, None, stage], (self.tokens, 2), (warp_n, 0))
            acc = self.tile.multiply_keys(tiled_mma, mma_tidx, tSrQ, sQ, keys)
            self.tile.softmax(
                acc, out, row_max, row_sum, last_visible, tScS, tile_scale,
                token + warp_n * self.tokens, needs_mask, window, scale, softcap,
            )  # fmt: skip
            self.tile.add_values(tiled_mma, value_mma, mma_tidx, acc, values, out)

        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self.partials.store_warp(
            out, tCcO, self.tile.value_column, row_max, row_sum, sO[None, None, None, warp_n]
        )
        cute.arch.barrier()
