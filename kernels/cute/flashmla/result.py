"""Rows of a CTA of `wgmma`, from accumulators: the result, or sums for `combine` to add up."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import finish
from kernelcat.kernels.cute.flashmla.place import LATENT
from kernelcat.kernels.cute.flashmla.seesaw import (
    COLUMNS,
    HALF,
    Sums,
)
from kernelcat.kernels.cute.flashmla.softmax import ROWS
from kernelcat.kernels.cute.gemm.stmatrix import registers_to_shared

LANES = 32


class Result:
    """What is left to do when all tiles are done; ``self`` has ``dtype`` and ``split``."""

    @cute.jit
    def leave(
        self,
        qk_mma: cute.TiledMma,
        sums: Sums,
        sTotal: cute.Tensor,  # (BLOCK, GROUPS)
        met: cute.Pointer,  # where both warpgroups meet
        sO: cute.Tensor,  # (BLOCK, PIECE, PIECES), in place of the queries
        vectors: cute.Tensor,  # the same as (8, 8, BLOCK, PIECES)
        gO: cute.Tensor,  # (8, LATENT / 8, rows)
        gL: cute.Tensor,  # (rows,)
        gPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK)
        group: Int32,
        num_rows: Int32,
        used: Int32,
    ):
        """``used`` is how many CTAs have a part of these rows."""
        tidx = cute.arch.thread_idx()[0] % 128
        row, lane = tidx // LANES * 16 + tidx % LANES // 4, tidx % 4
        for half in cutlass.range_constexpr(ROWS):
            share = cute.arch.warp_reduction_sum(sums.total[half], threads_in_group=4)
            if lane == 0:
                sTotal[row + 8 * half, group] = share
        # The queries have been read, too.
        cute.arch.mbarrier_arrive(met)
        cute.arch.mbarrier_wait(met, 0)
        cute.arch.sync_warp()
        for half in cutlass.range_constexpr(ROWS):
            at = row + 8 * half
            sums.total[half] = sTotal[at, 0] + sTotal[at, 1]
        if cutlass.const_expr(self.split):
            if used > 1:
                self.store_partial(sums, gPartial, group, row, lane, num_rows)
            else:
                self.store(qk_mma, sums, sO, vectors, gO, gL, group, row, lane, num_rows)
        else:
            self.store(qk_mma, sums, sO, vectors, gO, gL, group, row, lane, num_rows)

    @cute.jit
    def store_partial(
        self,
        sums: Sums,
        gPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK)
        group: Int32,
        row: Int32,
        lane: Int32,
        num_rows: Int32,
    ):
        """Float32, four lanes to a sector."""
        pair = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(ROWS):
            at = row + 8 * half
            if at < num_rows:
                for j in cutlass.range_constexpr(COLUMNS // 8):
                    for c in cutlass.range_constexpr(2):
                        pair[c] = sums.out[(c, half, j), 0, 0]
                    vector = group * (COLUMNS // 2) + 4 * j + lane
                    cute.autovec_copy(pair, gPartial[None, vector, at])
                if (lane == 0) & (group == 0):
                    pair[0], pair[1] = sums.most[half], sums.total[half]
                    cute.autovec_copy(pair, gPartial[None, LATENT // 2, at])

    @cute.jit
    def store(
        self,
        qk_mma: cute.TiledMma,
        sums: Sums,
        sO: cute.Tensor,  # (BLOCK, PIECE, PIECES)
        vectors: cute.Tensor,  # (8, 8, BLOCK, PIECES)
        gO: cute.Tensor,  # (8, LATENT / 8, rows)
        gL: cute.Tensor,  # (rows,)
        group: Int32,
        row: Int32,
        lane: Int32,
        num_rows: Int32,
    ):
        """Every warp its 16 rows, through shared memory."""
        tidx = cute.arch.thread_idx()[0] % 128
        factor = cute.make_rmem_tensor(ROWS, Float32)
        for half in cutlass.range_constexpr(ROWS):
            factor[half], lse = finish(sums.most[half], sums.total[half], Float32(0), False)
            at = row + 8 * half
            if (lane == 0) & (group == 0) & (at < num_rows):
                gL[at] = lse
        r2s, tRS_rO, tRS_sO = registers_to_shared(qk_mma, sO, tidx, self.dtype)
        for i in cutlass.range_constexpr(HALF):
            for j in cutlass.range_constexpr(COLUMNS // HALF // 8):
                for half in cutlass.range_constexpr(ROWS):
                    for c in cutlass.range_constexpr(2):
                        value = sums.out[(c, half, i * 8 + j), 0, 0] * factor[half]
                        tRS_rO[4 * j + 2 * half + c] = value.to(self.dtype)
            cute.copy(r2s, tRS_rO, tRS_sO[None, None, None, group * HALF + i])
        cute.arch.sync_warp()
        vector = tidx % LANES
        held = cute.make_rmem_tensor(8, self.dtype)
        for i in cutlass.range(16, unroll=4):
            at = tidx // LANES * 16 + i
            if at < num_rows:
                piece = group * HALF + vector // 8
                cute.autovec_copy(vectors[None, (vector % 8) ^ (at % 8), at, piece], held)
                cute.autovec_copy(held, gO[None, group * (COLUMNS // 8) + vector, at])
