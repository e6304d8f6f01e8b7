"""Stores the rows of a thread block of `wgmma`: results, or partial results for `combine`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.online_softmax import finish
from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.flashmla.seesaw import COLUMNS, HALF, Registers
from kernelcat.kernels.cute.flashmla.softmax import ROWS
from kernelcat.reference._mla_row import LATENT

LANES = 32


class Result:
    """A base class of `Wgmma`; uses its ``dtype`` and ``split``."""

    @cute.jit
    def store_rows(
        self,
        qk_mma: cute.TiledMma,
        registers: Registers,
        sRowSum: cute.Tensor,  # (BLOCK, WARPGROUPS)
        row_sums_full: cute.Pointer,  # barrier
        sO: cute.Tensor,  # (BLOCK, PIECE, PIECES), over the queries
        vectors: cute.Tensor,  # (8, 8, BLOCK, PIECES): sO in vectors
        gO: cute.Tensor,  # (8, LATENT / 8, rows)
        gL: cute.Tensor,  # (rows,)
        gPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK)
        warpgroup_idx: Int32,
        num_rows: Int32,
        used: Int32,
    ):
        """Adds the row sums of both warpgroups and stores the rows.

        ``used`` is the number of thread blocks that have a partial result of these rows.
        """
        tidx = cute.arch.thread_idx()[0] % 128
        row, lane = tidx // LANES * 16 + tidx % LANES // 4, tidx % 4
        for half in cutlass.range_constexpr(ROWS):
            warpgroup_sum = cute.arch.warp_reduction_sum(
                registers.row_sum[half], threads_in_group=4
            )
            if lane == 0:
                sRowSum[row + 8 * half, warpgroup_idx] = warpgroup_sum
        # After this barrier the queries have been read too.
        cute.arch.mbarrier_arrive(row_sums_full)
        cute.arch.mbarrier_wait(row_sums_full, 0)
        cute.arch.sync_warp()
        for half in cutlass.range_constexpr(ROWS):
            half_row = row + 8 * half
            registers.row_sum[half] = sRowSum[half_row, 0] + sRowSum[half_row, 1]
        if cutlass.const_expr(self.split):
            if used > 1:
                self.store_partial(registers, gPartial, warpgroup_idx, row, lane, num_rows)
            else:
                self.store(
                    qk_mma, registers, sO, vectors, gO, gL, warpgroup_idx, row, lane, num_rows
                )
        else:
            self.store(qk_mma, registers, sO, vectors, gO, gL, warpgroup_idx, row, lane, num_rows)

    @cute.jit
    def store_partial(
        self,
        registers: Registers,
        gPartial: cute.Tensor,  # (2, LATENT / 2 + 2, BLOCK)
        warpgroup_idx: Int32,
        row: Int32,
        lane: Int32,
        num_rows: Int32,
    ):
        """Stores a partial result in float32; four lanes write a sector of 32 bytes."""
        pair = cute.make_rmem_tensor(2, Float32)
        for half in cutlass.range_constexpr(ROWS):
            half_row = row + 8 * half
            if half_row < num_rows:
                for j in cutlass.range_constexpr(COLUMNS // 8):
                    for c in cutlass.range_constexpr(2):
                        pair[c] = registers.out[(c, half, j), 0, 0]
                    vector = warpgroup_idx * (COLUMNS // 2) + 4 * j + lane
                    cute.autovec_copy(pair, gPartial[None, vector, half_row])
                if (lane == 0) & (warpgroup_idx == 0):
                    pair[0], pair[1] = registers.row_max[half], registers.row_sum[half]
                    cute.autovec_copy(pair, gPartial[None, LATENT // 2, half_row])

    @cute.jit
    def store(
        self,
        qk_mma: cute.TiledMma,
        registers: Registers,
        sO: cute.Tensor,  # (BLOCK, PIECE, PIECES)
        vectors: cute.Tensor,  # (8, 8, BLOCK, PIECES)
        gO: cute.Tensor,  # (8, LATENT / 8, rows)
        gL: cute.Tensor,  # (rows,)
        warpgroup_idx: Int32,
        row: Int32,
        lane: Int32,
        num_rows: Int32,
    ):
        """Stores results; every warp its 16 rows, through shared memory."""
        tidx = cute.arch.thread_idx()[0] % 128
        factor = cute.make_rmem_tensor(ROWS, Float32)
        for half in cutlass.range_constexpr(ROWS):
            factor[half], lse = finish(
                registers.row_max[half], registers.row_sum[half], Float32(0), False
            )
            half_row = row + 8 * half
            if (lane == 0) & (warpgroup_idx == 0) & (half_row < num_rows):
                gL[half_row] = lse
        r2s, tRS_rO, tRS_sO = registers_to_shared(qk_mma, sO, tidx, self.dtype)
        for i in cutlass.range_constexpr(HALF):
            for j in cutlass.range_constexpr(COLUMNS // HALF // 8):
                for half in cutlass.range_constexpr(ROWS):
                    for c in cutlass.range_constexpr(2):
                        value = registers.out[(c, half, i * 8 + j), 0, 0] * factor[half]
                        tRS_rO[4 * j + 2 * half + c] = value.to(self.dtype)
            cute.copy(r2s, tRS_rO, tRS_sO[None, None, None, warpgroup_idx * HALF + i])
        cute.arch.sync_warp()
        vector = tidx % LANES
        loaded = cute.make_rmem_tensor(8, self.dtype)
        for i in cutlass.range(16, unroll=4):
            out_row = tidx // LANES * 16 + i
            if out_row < num_rows:
                piece = warpgroup_idx * HALF + vector // 8
                swizzled = (vector % 8) ^ (out_row % 8)
                cute.autovec_copy(vectors[None, swizzled, out_row, piece], loaded)
                out_vector = warpgroup_idx * (COLUMNS // 8) + vector
                cute.autovec_copy(loaded, gO[None, out_vector, out_row])
