"""GEMM on tensor cores since Ampere: cp.async into a ring of stages, ldmatrix, mma.sync.

A 16-byte vector of a tile that lies outside its matrix becomes zeros in shared memory instead of a
copy, so that ragged M, N and K read nothing outside. The layouts are those of CUTLASS's Ampere
example.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import VECTOR, Epilogue
from kernelcat.kernels.cute.common.tile_order import grouped_tile

BLOCK_K = 64
GROUP_M = 8
VECTORS_K = BLOCK_K // VECTOR
"""Vectors in a row of a stage."""


class Tiled:
    """Tiles of ``block_m`` x ``block_n``; K is a multiple of 8.

    A warp computes 32 columns of the upper or the lower half of a tile. With ``is_paired`` two
    neighbours of D are stored at once, which needs an even number of columns.
    """

    def __init__(
        self, block_m: int, block_n: int, num_stages: int, is_paired: bool, **epilogue: str | bool
    ):
        self.epilogue = Epilogue(**epilogue)
        self.dtype = self.epilogue.dtype
        self.is_paired = is_paired and not self.epilogue.is_gated
        self.block_m, self.block_n, self.num_stages = block_m, block_n, num_stages
        self.warps_n = block_n // 32
        self.threads = 2 * 32 * self.warps_n
        self.pass_rows = self.threads // VECTORS_K

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        residual: cute.Pointer,  # like d
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        stride_k = cute.assume(Int64(k), divby=VECTOR)
        num_cols = n // self.epilogue.span
        stride_d = Int64(num_cols)
        if cutlass.const_expr(self.is_paired):
            stride_d = cute.assume(stride_d, divby=2)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(stride_k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(stride_k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, num_cols), stride=(stride_d, 1)))
        mR = cute.make_tensor(residual, mD.layout)
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        a_layout, b_layout = self.shared_layout(self.block_m), self.shared_layout(self.block_n)
        # A warp has two neighbouring groups of 8 columns, so that one ldmatrix.x4 feeds two mma.
        tiled_mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)),
            cute.make_layout((2, self.warps_n, 1)),
            permutation_mnk=(32, 16 * self.warps_n, 16),
        )
        tiled_copy = cute.make_tiled_copy_tv(
            cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
                self.dtype,
                num_bits_per_copy=128,
            ),
            cute.make_layout((self.pass_rows, VECTORS_K), stride=(VECTORS_K, 1)),
            cute.make_layout((1, VECTOR)),
        )

        num_tiles_m, num_tiles_n = cute.ceil_div(m, self.block_m), cute.ceil_div(n, self.block_n)
        self.kernel(
            mA, mB, mBias, mR, mD, a_layout, b_layout, tiled_mma, tiled_copy,
            num_tiles_m, num_tiles_n,
        ).launch(
            grid=(num_tiles_m * num_tiles_n, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    def shared_layout(self, rows):
        """(rows, BLOCK_K, stages), swizzled in atoms of 8 x 128 bytes against bank conflicts."""
        atom = cute.make_composed_layout(
            cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, BLOCK_K), stride=(BLOCK_K, 1))
        )
        return cute.tile_to_shape(atom, (rows, BLOCK_K, self.num_stages), (0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (m, k)
        mB: cute.Tensor,  # (n, k)
        mBias: cute.Tensor,  # (n,)
        mR: cute.Tensor,  # (m, columns of D)
        mD: cute.Tensor,  # (m, columns of D)
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        m_idx, n_idx = grouped_tile(cute.arch.block_idx()[0], num_tiles_m, num_tiles_n, GROUP_M)
        shared = SmemAllocator()
        sA = shared.allocate_tensor(self.dtype, a_layout, 1024)
        sB = shared.allocate_tensor(self.dtype, b_layout, 1024)

        thr_copy = tiled_copy.get_slice(tidx)
        gA = cute.local_tile(mA, (self.block_m, BLOCK_K), (m_idx, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK_K), (n_idx, None))
        tAgA, tAsA = thr_copy.partition_S(gA), thr_copy.partition_D(sA)
        tBgB, tBsB = thr_copy.partition_S(gB), thr_copy.partition_D(sB)
        k = mA.shape[1]
        num_k_blocks = cute.ceil_div(k, BLOCK_K)
        rows_a = mA.shape[0] - m_idx * self.block_m
        rows_b = mB.shape[0] - n_idx * self.block_n

        for stage in cutlass.range_constexpr(self.num_stages - 1):
            if stage < num_k_blocks:
                self.load(tiled_copy, tAgA, tAsA, rows_a, k, stage, stage, tidx)
                self.load(tiled_copy, tBgB, tBsB, rows_b, k, stage, stage, tidx)
            cute.arch.cp_async_commit_group()

        thr_mma = tiled_mma.get_slice(tidx)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA[None, None, 0]))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB[None, None, 0]))
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((self.block_m, self.block_n)))
        acc = cute.make_rmem_tensor(tCcD.shape, Float32)
        acc.fill(0.0)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy_a = cute.make_tiled_copy_A(ldmatrix, tiled_mma)
        copy_b = cute.make_tiled_copy_B(ldmatrix, tiled_mma)
        tSsA, tSrA = copy_a.get_slice(tidx).partition_S(sA), copy_a.retile(tCrA)
        tSsB, tSrB = copy_b.get_slice(tidx).partition_S(sB), copy_b.retile(tCrB)

        for k_idx in cutlass.range(num_k_blocks, unroll=1):
            # This k-block has arrived, and all warps have read the stage that is loaded next.
            cute.arch.cp_async_wait_group(self.num_stages - 2)
            cute.arch.barrier()
            ahead = k_idx + self.num_stages - 1
            if ahead < num_k_blocks:
                next_stage = ahead % self.num_stages
                self.load(tiled_copy, tAgA, tAsA, rows_a, k, ahead, next_stage, tidx)
                self.load(tiled_copy, tBgB, tBsB, rows_b, k, ahead, next_stage, tidx)
            cute.arch.cp_async_commit_group()
            stage = k_idx % self.num_stages
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.copy(copy_a, tSsA[None, None, block, stage], tSrA[None, None, block])
                cute.copy(copy_b, tSsB[None, None, block, stage], tSrB[None, None, block])
                cute.gemm(
                    tiled_mma, acc, tCrA[None, None, block], tCrB[None, None, block], acc
                )

        self.store(acc, tCcD, mBias, mR, mD, m_idx, n_idx)

    @cute.jit
    def load(
        self,
        tiled_copy: cute.TiledCopy,
        source: cute.Tensor,  # (vector, rows of a thread, 1, k-blocks) in global memory
        target: cute.Tensor,  # (vector, rows of a thread, 1, stages) in shared memory
        rows: Int32,
        k: Int32,
        k_idx: Int32,
        stage: Int32,
        tidx: Int32,
    ):
        """Start copying this thread's vectors of a tile; zeros stand for vectors outside."""
        zeros = cute.make_rmem_tensor(VECTOR, self.dtype)
        zeros.fill(0)
        first = tidx // VECTORS_K
        is_inside_k = k_idx * BLOCK_K + tidx % VECTORS_K * VECTOR < k
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            if is_inside_k and first + i * self.pass_rows < rows:
                cute.copy(tiled_copy, source[None, i, 0, k_idx], target[None, i, 0, stage])
            else:
                cute.autovec_copy(zeros, target[None, i, 0, stage])

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_N): a pair of columns, in rows eight apart
        tCcD: cute.Tensor,  # coordinates of acc in the tile
        mBias: cute.Tensor,  # (n,)
        mR: cute.Tensor,  # (m, columns of D)
        mD: cute.Tensor,  # (m, columns of D)
        m_idx: Int32,
        n_idx: Int32,
    ):
        """Apply the epilogue to a thread's accumulators, and store what lies inside D."""
        last = cute.size(mBias) - 1
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                for half in cutlass.range_constexpr(2):
                    row, col = tCcD[(0, half), i, j]
                    row, col = m_idx * self.block_m + row, n_idx * self.block_n + col
                    lo, hi = acc[(0, half), i, j], acc[(1, half), i, j]
                    if row < mD.shape[0] and col <= last:
                        if cutlass.const_expr(self.epilogue.bias):
                            lo += Float32(mBias[col])
                            hi += Float32(mBias[cutlass.min(col + 1, last)])
                        self.store_pair(lo, hi, mR, mD, row, col)

    @cute.jit
    def store_pair(
        self,
        lo: Float32,
        hi: Float32,
        mR: cute.Tensor,  # (m, columns of D)
        mD: cute.Tensor,  # (m, columns of D)
        row: Int32,
        col: Int32,
    ):
        """Store what columns ``col`` (even) and ``col + 1`` of Z + bias make of a row of D."""
        if cutlass.const_expr(self.epilogue.is_gated):
            mD[row, col // 2] = self.finish(self.epilogue.gate(lo, hi), mR, row, col // 2)
        elif cutlass.const_expr(self.is_paired):
            out = cute.make_rmem_tensor((1, 2), self.dtype)
            gD = cute.local_tile(mD, (1, 2), (row, col // 2))
            out[0] = self.finish(self.epilogue.activate(lo), mR, row, col)
            out[1] = self.finish(self.epilogue.activate(hi), mR, row, col + 1)
            cute.autovec_copy(out, gD)
        else:
            mD[row, col] = self.finish(self.epilogue.activate(lo), mR, row, col)
            if col + 1 < mD.shape[1]:
                mD[row, col + 1] = self.finish(self.epilogue.activate(hi), mR, row, col + 1)

    @cute.jit
    def finish(
        self,
        value: Float32,
        mR: cute.Tensor,  # (m, columns of D)
        row: Int32,
        col: Int32,
    ):
        """Add the residual and round."""
        if cutlass.const_expr(self.epilogue.residual):
            value += Float32(mR[row, col])
        return value.to(self.dtype)
