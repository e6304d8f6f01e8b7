"""A CTA's rows against its share of the tokens: a ring of tiles, each copied ahead of its turn."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import LOWEST


class Rows:
    """The main loop of ``Split``, which has ``pages``, ``tile`` and ``merge`` to work with."""

    @cute.jit
    def attend(
        self,
        tiled_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        gQ: cute.Tensor,  # (head_dim, group, query tokens) that share the key-value head
        mK: cute.Tensor,  # ((VECTOR, 1), 1, vectors)
        mV: cute.Tensor,
        gTable: cute.Tensor,  # (table_width,)
        gKS: cute.Tensor,  # (pages,)
        gVS: cute.Tensor,
        pages: cute.Tensor,  # (lookups, stages - 1) of the first tiles; overwritten
        sK: cute.Tensor,  # (block_n, width, stages)
        sV: cute.Tensor,
        sScale: cute.Tensor,  # (block_n, 2, stages)
        sQ: cute.Tensor,  # (8, MMA_K, threads)
        sO: cute.Tensor,  # (VECTOR, vectors + 1, block_m, warps_n), in place of keys and values
        kv_head: Int32,
        slot_vectors: Int32,
        group: Int32,
        before: Int32,
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
        """Rows against tiles of tokens; leaves each warp's maxima, sums and values in ``sO``."""
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
        lookahead = tile_begin + (self.stages - 1) * tile_step
        self.pages.find(gTable, pages[None, 0], lookahead, tidx)

        # The warps of a column share their tokens, those of a row the rows.
        column_threads = 32 * self.warps_m
        mma_tidx, warp_n = tidx % column_threads, tidx // column_threads
        thr_mma = tiled_mma.get_slice(mma_tidx)
        dim = self.head_dim
        tCcQ = thr_mma.partition_A(cute.make_identity_tensor((self.block_m, dim)))
        tScS = thr_mma.partition_C(cute.make_identity_tensor((self.block_m, self.tokens)))
        tCcO = thr_mma.partition_C(cute.make_identity_tensor((self.block_m, dim)))
        sQ = sQ[None, None, tidx]
        tSrQ = self.tile.load_query(tiled_mma, sQ, tCcQ, gQ, row_begin, row_end, group)
        out = cute.make_rmem_tensor(tCcO.shape, Float32)
        out.fill(0.0)
        num_rows = 2 * cute.size(out, mode=[1])
        most = cute.make_rmem_tensor(num_rows, Float32)
        total = cute.make_rmem_tensor(num_rows, Float32)
        limits = cute.make_rmem_tensor(num_rows, Int32)
        most.fill(LOWEST)
        total.fill(0.0)
        for i in cutlass.range_constexpr(num_rows):
            row = row_begin + tScS[(0, i % 2), i // 2, 0][0]
            limits[i] = before + cutlass.min(row, row_end - 1) // group
        first, last = before + row_begin // group, before + (row_end - 1) // group

        for index in cutlass.range(num_tiles, unroll=1):
            # This tile has landed, and everyone is done with the stage that is filled next.
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.barrier()
            ahead = index + self.stages - 1
            if ahead < num_tiles:
                stage, tile = ahead % self.stages, tile_begin + ahead * tile_step
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
            hides = token + self.block_n > first + 1
            if cutlass.const_expr(self.window):
                hides = hides or token <= last - window
            own = (self.tokens, self.tile.width)
            keys = cute.local_tile(sK[None, None, stage], own, (warp_n, 0))
            values = cute.local_tile(sV[None, None, stage], own, (warp_n, 0))
            tile_scale = cute.local_tile(sScale[None, None, stage], (self.tokens, 2), (warp_n, 0))
            acc = self.tile.scores(tiled_mma, mma_tidx, tSrQ, sQ, keys)
            self.tile.softmax(
                acc, out, most, total, limits, tScS, tile_scale,
                token + warp_n * self.tokens, hides, window, scale, softcap,
            )  # fmt: skip
            self.tile.values(tiled_mma, value_mma, mma_tidx, acc, values, out)

        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self.merge.leave(
            out, tCcO, self.tile.value_column, most, total, sO[None, None, None, warp_n]
        )
        cute.arch.barrier()
