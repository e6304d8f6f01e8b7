"""How a warpgroup's accumulators become rows of D: epilogue, shared memory, TMA."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.epilogue import Epilogue
from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.common.tma import partition, store_atom

AHEAD = 2
"""Parts for which the residual is asked in advance."""
FIRST_BARRIER = 1
"""The first of a named barrier for each warpgroup: its part of D is in shared memory."""


class WarpgroupStore:
    """Stores ``rows`` x ``block_n`` of Z, finished, in parts of 64 x ``part_n`` of D.

    Every warpgroup has buffers and a barrier of its own and waits for no other.
    """

    def __init__(self, epilogue: Epilogue, rows: int, block_n: int):
        self.epilogue, self.dtype = epilogue, epilogue.dtype
        self.rows, self.block_n = rows, block_n
        self.cols = block_n // epilogue.span
        wide = self.cols % 32 == 0 and not epilogue.residual  # whose registers are then needed
        self.part_n = 32 if wide else 16
        self.parts = self.cols // self.part_n
        self.part_bytes = 2 * 64 * self.part_n
        self.stages = 64 // self.part_n
        self.least_bytes = self.stages * self.part_bytes

    def take(self, shared_bytes: int):
        """Use so much shared memory for as many buffers as help."""
        self.stages = min(shared_bytes // self.part_bytes, 8)

    def shared_layout(self, warpgroups: int):
        part = (64, self.part_n)
        stages = warpgroups * self.stages
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, part, stages)

    def tma_atom(self, mD, layout):
        return store_atom(mD, layout, (64, self.part_n))

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # ((2, 2, block_n / 8), rows / 64, 1)
        tiled_mma: cute.TiledMma,
        sD: cute.Tensor,  # (64, part_n, stages of all warpgroups)
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,
        mBias: cute.Tensor,  # (2, n / 2)
        mR: cute.Tensor,  # (2, columns of D / 2, m)
        row: Int32,
        col: Int32,
        group: Int32,
    ):
        """``row`` is the first row, ``col`` counts tiles, ``group`` warpgroups.

        One barrier a part: warp 0 lets no more than ``stages - 2`` stores go on reading, so the
        buffer that is filled after the next barrier is free.
        """
        tidx = cute.arch.thread_idx()[0] % 128
        warp_idx = cute.arch.make_warp_uniform(tidx // 32)
        r2s, tRS_rD, tRS_sD = registers_to_shared(tiled_mma, sD, tidx, self.dtype)
        gD = cute.local_tile(mD, (64, self.part_n), (None, None))
        bSG_sD, bSG_gD = partition(d_atom, sD, gD)
        fetched = cute.make_rmem_tensor((2, 2, self.part_n // 8, AHEAD), self.dtype)
        count = self.rows // 64 * self.parts
        for step in cutlass.range_constexpr(min(AHEAD, count)):
            self.fetch(fetched[None, None, None, step], mR, row, col, step)
        if warp_idx == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync(group)
        for step in cutlass.range_constexpr(count):
            i, part = step // self.parts, step % self.parts
            stage = group * self.stages + step % self.stages
            theirs = fetched[None, None, None, step % AHEAD]
            self.finish(acc[None, i, 0], theirs, tRS_rD, mBias, col, part)
            if cutlass.const_expr(step + AHEAD < count):
                self.fetch(theirs, mR, row, col, step + AHEAD)
            cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(group)
            if warp_idx == 0:
                target = bSG_gD[None, row // 64 + i, col * self.parts + part]
                cute.copy(d_atom, bSG_sD[None, stage], target)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(self.stages - 2, read=True)

    @cute.jit
    def sync(self, group: Int32):
        """All four warps of a warpgroup."""
        cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)

    @cute.jit
    def fetch(
        self,
        out: cute.Tensor,  # (2, 2, part_n / 8), as a thread's accumulators
        mR: cute.Tensor,  # (2, columns of D / 2, m)
        row: Int32,
        col: Int32,
        step: cutlass.Constexpr[int],
    ):
        """Ask for a thread's share of the residual of part ``step``."""
        if cutlass.const_expr(self.epilogue.residual):
            tidx = cute.arch.thread_idx()[0] % 128
            row += step // self.parts * 64 + tidx // 32 * 16 + tidx % 32 // 4
            first = (col * self.parts + step % self.parts) * (self.part_n // 2) + tidx % 4
            for j in cutlass.range_constexpr(self.part_n // 8):
                for half in cutlass.range_constexpr(2):
                    if row + half * 8 < mR.shape[2] and first + j * 4 < mR.shape[1]:
                        source = mR[None, first + j * 4, row + half * 8]
                        cute.autovec_copy(source, out[None, half, j])

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,  # (2, 2, block_n / 8): neighbours, eight rows apart, columns of 8
        theirs: cute.Tensor,  # (2, 2, part_n / 8) of the residual
        out: cute.Tensor,  # as ``theirs``
        mBias: cute.Tensor,  # (2, n / 2)
        col: Int32,
        part: cutlass.Constexpr[int],
    ):
        """The epilogue's arithmetic on a thread's share of a part."""
        lane = cute.arch.thread_idx()[0] % 32
        for j in cutlass.range_constexpr(self.part_n // 8):
            octet = part * (self.part_n // 8) + j
            for half in cutlass.range_constexpr(2):
                lo, hi = self.columns(acc, mBias, col, lane, octet, half)
                if cutlass.const_expr(self.epilogue.residual):
                    lo += Float32(theirs[0, half, j])
                    hi += Float32(theirs[1, half, j])
                out[4 * j + 2 * half] = lo.to(self.dtype)
                out[4 * j + 2 * half + 1] = hi.to(self.dtype)

    @cute.jit
    def columns(
        self,
        acc: cute.Tensor,  # (2, 2, block_n / 8)
        mBias: cute.Tensor,  # (2, n / 2)
        col: Int32,
        lane: Int32,
        octet: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ):
        """Columns 2 * (lane % 4) and the next of the tile's ``octet``-th eight columns of D."""
        if cutlass.const_expr(self.epilogue.gated):
            x = self.epilogue.gate(*self.biased(acc, mBias, col, lane, 2 * octet, half))
            y = self.epilogue.gate(*self.biased(acc, mBias, col, lane, 2 * octet + 1, half))
            # A quad's lanes hold columns 0 to 3 (x) and 4 to 7 (y); each wants two neighbours.
            upper, odd = lane % 4 >= 2, lane % 2 == 1
            kept = y if upper else x
            got = cute.arch.shuffle_sync_bfly(x if upper else y, 2)
            lo, hi = got if upper else kept, kept if upper else got
            kept = hi if odd else lo
            got = cute.arch.shuffle_sync_bfly(lo if odd else hi, 1)
            lo, hi = got if odd else kept, kept if odd else got
        else:
            lo, hi = self.biased(acc, mBias, col, lane, octet, half)
            lo, hi = self.epilogue.activate(lo), self.epilogue.activate(hi)
        return lo, hi

    @cute.jit
    def biased(
        self,
        acc: cute.Tensor,  # (2, 2, block_n / 8)
        mBias: cute.Tensor,  # (2, n / 2)
        col: Int32,
        lane: Int32,
        octet: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ):
        """Two neighbours of Z; columns past the end take the last bias: they are never stored."""
        lo, hi = acc[4 * octet + 2 * half], acc[4 * octet + 2 * half + 1]
        if cutlass.const_expr(self.epilogue.bias):
            pair = cute.make_rmem_tensor(2, self.dtype)
            at = col * (self.block_n // 2) + octet * 4 + lane % 4
            cute.autovec_copy(mBias[None, cutlass.min(at, mBias.shape[1] - 1)], pair)
            lo, hi = lo + Float32(pair[0]), hi + Float32(pair[1])
        return lo, hi
