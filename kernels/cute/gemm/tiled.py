"""GEMM on tensor cores since Ampere: cp.async into a ring of stages, ldmatrix, mma.sync.

Every 16-byte piece of a tile that lies outside its matrix is written as zeros instead of copied, so
ragged M, N and K read nothing they must not. The layouts are those of CUTLASS's Ampere example.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.gemm.raster import grouped

BLOCK_K = 64
VECTOR = 8
GROUP_M = 8
VECTORS_K = BLOCK_K // VECTOR


class Tiled:
    """Tiles of ``block_m`` x ``block_n``, a warp for 32 columns of each half; K a multiple of 8.

    ``paired`` stores two neighbours of D at once, which needs an even N.
    """

    def __init__(
        self, dtype: str, bias: bool, block_m: int, block_n: int, stages: int, paired: bool
    ):
        self.dtype, self.has_bias, self.paired = element_type(dtype), bias, paired
        self.block_m, self.block_n, self.stages = block_m, block_n, stages
        self.warps_n = block_n // 32
        self.threads = 2 * 32 * self.warps_n
        self.rows_a_pass = self.threads // VECTORS_K

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        row_k = cute.assume(Int64(k), divby=VECTOR)
        row_n = cute.assume(Int64(n), divby=2) if cutlass.const_expr(self.paired) else Int64(n)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(row_k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(row_k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(row_n, 1)))
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        a_layout, b_layout = self.shared_layout(self.block_m), self.shared_layout(self.block_n)
        # Two neighbouring 8-wide columns a warp, so that one ldmatrix.x4 feeds two products.
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
            cute.make_layout((self.rows_a_pass, VECTORS_K), stride=(VECTORS_K, 1)),
            cute.make_layout((1, VECTOR)),
        )

        tiles_m, tiles_n = cute.ceil_div(m, self.block_m), cute.ceil_div(n, self.block_n)
        self.kernel(
            mA, mB, mBias, mD, a_layout, b_layout, tiled_mma, tiled_copy, tiles_m, tiles_n
        ).launch(
            grid=(tiles_m * tiles_n, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def shared_layout(self, rows):
        """(rows, BLOCK_K, stages) in atoms of 8 x 128 bytes: ldmatrix meets no bank conflict."""
        atom = cute.make_composed_layout(
            cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, BLOCK_K), stride=(BLOCK_K, 1))
        )
        return cute.tile_to_shape(atom, (rows, BLOCK_K, self.stages), (0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mBias: cute.Tensor,
        mD: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        tiled_copy: cute.TiledCopy,
        tiles_m: Int32,
        tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        m_idx, n_idx = grouped(cute.arch.block_idx()[0], tiles_m, tiles_n, GROUP_M)
        shared = SmemAllocator()
        sA = shared.allocate_tensor(self.dtype, a_layout, 1024)
        sB = shared.allocate_tensor(self.dtype, b_layout, 1024)

        thr_copy = tiled_copy.get_slice(tidx)
        gA = cute.local_tile(mA, (self.block_m, BLOCK_K), (m_idx, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK_K), (n_idx, None))
        tAgA, tAsA = thr_copy.partition_S(gA), thr_copy.partition_D(sA)
        tBgB, tBsB = thr_copy.partition_S(gB), thr_copy.partition_D(sB)
        k = mA.shape[1]
        k_tiles = cute.ceil_div(k, BLOCK_K)
        rows_a = mA.shape[0] - m_idx * self.block_m
        rows_b = mB.shape[0] - n_idx * self.block_n

        for stage in cutlass.range_constexpr(self.stages - 1):
            if stage < k_tiles:
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

        for k_idx in cutlass.range(k_tiles, unroll=1):
            # This tile has landed, and everyone is done with the stage that is filled next.
            cute.arch.cp_async_wait_group(self.stages - 2)
            cute.arch.barrier()
            ahead = k_idx + self.stages - 1
            if ahead < k_tiles:
                self.load(tiled_copy, tAgA, tAsA, rows_a, k, ahead, ahead % self.stages, tidx)
                self.load(tiled_copy, tBgB, tBsB, rows_b, k, ahead, ahead % self.stages, tidx)
            cute.arch.cp_async_commit_group()
            stage = k_idx % self.stages
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.copy(copy_a, tSsA[None, None, block, stage], tSrA[None, None, block])
                cute.copy(copy_b, tSsB[None, None, block, stage], tSrB[None, None, block])
                cute.gemm(
                    tiled_mma, acc, tCrA[None, None, block], tCrB[None, None, block], acc
                )

        gD = cute.local_tile(mD, (self.block_m, self.block_n), (m_idx, n_idx))
        self.store(acc, thr_mma.partition_C(gD), tCcD, mBias, rows_a, rows_b, n_idx)

    @cute.jit
    def load(
        self,
        tiled_copy: cute.TiledCopy,
        source: cute.Tensor,
        target: cute.Tensor,
        rows: Int32,
        k: Int32,
        k_idx: Int32,
        stage: Int32,
        tidx: Int32,
    ):
        """Start copying this thread's pieces of a tile; pieces outside become zeros."""
        zeros = cute.make_rmem_tensor(VECTOR, self.dtype)
        zeros.fill(0)
        first = tidx // VECTORS_K
        inside_k = k_idx * BLOCK_K + tidx % VECTORS_K * VECTOR < k
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            if inside_k and first + i * self.rows_a_pass < rows:
                cute.copy(tiled_copy, source[None, i, 0, k_idx], target[None, i, 0, stage])
            else:
                cute.autovec_copy(zeros, target[None, i, 0, stage])

    @cute.jit
    def store(
        self,
        acc: cute.Tensor,  # ((2, 2), MMA_M, MMA_N): a pair of columns, eight rows apart
        tCgD: cute.Tensor,
        tCcD: cute.Tensor,
        mBias: cute.Tensor,
        rows: Int32,
        cols: Int32,
        n_idx: Int32,
    ):
        out = cute.make_rmem_tensor(2, self.dtype)
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                for half in cutlass.range_constexpr(2):
                    at = ((None, half), i, j)
                    row, col = tCcD[(0, half), i, j]
                    for c in cutlass.range_constexpr(2):
                        value = acc[(c, half), i, j]
                        if cutlass.const_expr(self.has_bias):
                            here = cutlass.min(col + c, cols - 1)
                            value += Float32(mBias[n_idx * self.block_n + here])
                        out[c] = value.to(self.dtype)
                    if cutlass.const_expr(self.paired):
                        if row < rows and col < cols:
                            cute.autovec_copy(out, tCgD[at])
                    else:
                        for c in cutlass.range_constexpr(2):
                            if row < rows and col + c < cols:
                                tCgD[(c, half), i, j] = out[c]
