"""From the accumulators of a warpgroup to rows of D: epilogue, shared memory, TMA."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.epilogue import Epilogue
from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.common.tma import partition, store_atom

AHEAD = 2
"""Parts for which the residual is loaded in advance."""
FIRST_BARRIER = 1
"""The first of the named barriers, one for each warpgroup."""
MAX_STAGES = 8


class WarpgroupStore:
    """Makes D of ``rows`` x ``block_n`` of Z, and stores parts of 64 x ``part_n`` of D by TMA.

    Every warpgroup has buffers and a named barrier of its own, and does not wait for the other one.
    """

    def __init__(self, epilogue: Epilogue, rows: int, block_n: int):
        self.epilogue, self.dtype = epilogue, epilogue.dtype
        self.rows, self.block_n = rows, block_n
        num_cols = block_n // epilogue.span
        # Parts are narrow where a residual, which is loaded ahead, takes registers.
        is_wide = num_cols % 32 == 0 and not epilogue.residual
        self.part_n = 32 if is_wide else 16
        self.num_parts = num_cols // self.part_n
        self.part_bytes = 2 * 64 * self.part_n
        self.num_stages = 64 // self.part_n
        self.min_bytes = self.num_stages * self.part_bytes

    def use(self, shared_bytes: int):
        """Use ``shared_bytes`` of shared memory for as many buffers as help."""
        self.num_stages = min(shared_bytes // self.part_bytes, MAX_STAGES)

    def shared_layout(self, num_warpgroups: int):
        """(64, part_n, buffers of all warpgroups), swizzled."""
        part = (64, self.part_n)
        num_stages = num_warpgroups * self.num_stages
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, part, num_stages)

    def tma_atom(self, mD, layout):
        """TMA stores of a buffer of ``layout`` into parts of ``mD`` (m, columns of D)."""
        return store_atom(mD, layout, (64, self.part_n))

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # ((2, 2, block_n / 8), rows / 64, 1)
        tiled_mma: cute.TiledMma,
        sD: cute.Tensor,  # (64, part_n, stages of all warpgroups)
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,  # (m, columns of D), coordinates for TMA
        mBias: cute.Tensor,  # (2, n / 2)
        mR: cute.Tensor,  # (2, columns of D / 2, m)
        row: Int32,
        col: Int32,
        group: Int32,
    ):
        """Store the tile of warpgroup ``group`` from row ``row`` on, in column ``col`` of tiles.

        There is one barrier for each part: before it warp 0 waits until no more than ``num_stages
        - 2`` stores read their buffers, so the buffer that is written after the barrier is free.
        """
        tidx = cute.arch.thread_idx()[0] % 128
        warp_idx = cute.arch.make_warp_uniform(tidx // 32)
        r2s, tRS_rD, tRS_sD = registers_to_shared(tiled_mma, sD, tidx, self.dtype)
        gD = cute.local_tile(mD, (64, self.part_n), (None, None))
        bSG_sD, bSG_gD = partition(d_atom, sD, gD)
        rR = cute.make_rmem_tensor((2, 2, self.part_n // 8, AHEAD), self.dtype)
        count = self.rows // 64 * self.num_parts
        for step in cutlass.range_constexpr(min(AHEAD, count)):
            self.load_residual(rR[None, None, None, step], mR, row, col, step)
        if warp_idx == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync(group)
        for step in cutlass.range_constexpr(count):
            i, part = step // self.num_parts, step % self.num_parts
            stage = group * self.num_stages + step % self.num_stages
            residual = rR[None, None, None, step % AHEAD]
            self.finish(acc[None, i, 0], residual, tRS_rD, mBias, col, part)
            if cutlass.const_expr(step + AHEAD < count):
                self.load_residual(residual, mR, row, col, step + AHEAD)
            cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(group)
            if warp_idx == 0:
                target = bSG_gD[None, row // 64 + i, col * self.num_parts + part]
                cute.copy(d_atom, bSG_sD[None, stage], target)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(self.num_stages - 2, read=True)

    @cute.jit
    def sync(self, group: Int32):
        """Synchronize the four warps of a warpgroup."""
        cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)

    @cute.jit
    def load_residual(
        self,
        out: cute.Tensor,  # (2, 2, part_n / 8), laid out like a thread's accumulators
        mR: cute.Tensor,  # (2, columns of D / 2, m)
        row: Int32,
        col: Int32,
        step: cutlass.Constexpr[int],
    ):
        """Load the residual of this thread's elements of part ``step``."""
        if cutlass.const_expr(self.epilogue.residual):
            tidx = cute.arch.thread_idx()[0] % 128
            row += step // self.num_parts * 64 + tidx // 32 * 16 + tidx % 32 // 4
            first = (col * self.num_parts + step % self.num_parts) * (self.part_n // 2) + tidx % 4
            for j in cutlass.range_constexpr(self.part_n // 8):
                for half in cutlass.range_constexpr(2):
                    if row + half * 8 < mR.shape[2] and first + j * 4 < mR.shape[1]:
                        source = mR[None, first + j * 4, row + half * 8]
                        cute.autovec_copy(source, out[None, half, j])

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,  # (2, 2, block_n / 8): neighbours, rows eight apart, groups of 8 columns
        residual: cute.Tensor,  # (2, 2, part_n / 8)
        out: cute.Tensor,  # (2, 2, part_n / 8), written
        mBias: cute.Tensor,  # (2, n / 2)
        col: Int32,
        part: cutlass.Constexpr[int],
    ):
        """Apply the epilogue to this thread's elements of a part."""
        lane = cute.arch.thread_idx()[0] % 32
        for j in cutlass.range_constexpr(self.part_n // 8):
            octet = part * (self.part_n // 8) + j
            for half in cutlass.range_constexpr(2):
                lo, hi = self.columns(acc, mBias, col, lane, octet, half)
                if cutlass.const_expr(self.epilogue.residual):
                    lo += Float32(residual[0, half, j])
                    hi += Float32(residual[1, half, j])
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
        """Columns 2 * (lane % 4) and the next one of the tile's ``octet``-th octet of D.

        With swiglu a lane makes one column of D of each of two octets of Z, lane % 4 (x) and
        4 + lane % 4 (y). Two exchanges within a quad of lanes give every lane two neighbours.
        """
        if cutlass.const_expr(self.epilogue.is_gated):
            x = self.epilogue.gate(*self.add_bias(acc, mBias, col, lane, 2 * octet, half))
            y = self.epilogue.gate(*self.add_bias(acc, mBias, col, lane, 2 * octet + 1, half))
            is_upper, is_odd = lane % 4 >= 2, lane % 2 == 1
            mine = y if is_upper else x
            other = cute.arch.shuffle_sync_bfly(x if is_upper else y, 2)
            lo, hi = other if is_upper else mine, mine if is_upper else other
            mine = hi if is_odd else lo
            other = cute.arch.shuffle_sync_bfly(lo if is_odd else hi, 1)
            lo, hi = other if is_odd else mine, mine if is_odd else other
        else:
            lo, hi = self.add_bias(acc, mBias, col, lane, octet, half)
            lo, hi = self.epilogue.activate(lo), self.epilogue.activate(hi)
        return lo, hi

    @cute.jit
    def add_bias(
        self,
        acc: cute.Tensor,  # (2, 2, block_n / 8)
        mBias: cute.Tensor,  # (2, n / 2)
        col: Int32,
        lane: Int32,
        octet: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ):
        """Two neighbours of Z + bias; columns outside of D, never stored, add the last bias."""
        lo, hi = acc[4 * octet + 2 * half], acc[4 * octet + 2 * half + 1]
        if cutlass.const_expr(self.epilogue.bias):
            pair = cute.make_rmem_tensor(2, self.dtype)
            at = col * (self.block_n // 2) + octet * 4 + lane % 4
            cute.autovec_copy(mBias[None, cutlass.min(at, mBias.shape[1] - 1)], pair)
            lo, hi = lo + Float32(pair[0]), hi + Float32(pair[1])
        return lo, hi
