"""GEMM on Blackwell's tensor cores: TMA in, tcgen05 with two accumulators in tensor memory.

Persistent. One warp loads, one issues the products, four read an accumulator out of tensor memory,
a row a thread, while the products of the next tile fill the other. With ``ctas`` = 2 a pair of SMs
works as one: each holds half of the tile's rows and half of B, and one of them issues for both.
Never run yet: only compiled, and modelled on CUTLASS's persistent Blackwell GEMM.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.memory import SmemAllocator, TmemAllocator

from kernelcat.kernels.cute.common.epilogue import VECTOR, Epilogue
from kernelcat.kernels.cute.common.tensor_memory import (
    ACCUMULATORS,
    COLUMNS,
    LOAD_WARP,
    MMA_WARP,
    ROWS,
    THREADS,
    make_rings,
    read_columns,
)
from kernelcat.kernels.cute.common.tile_order import grouped
from kernelcat.kernels.cute.common.tma import partition

BLOCK_K = 64
SHARED_BYTES = 227 * 1024
GROUP_ROWS = 2048


class Tcgen05:
    """Tiles of 128 * ``ctas`` x ``block_n``; N and K are multiples of 8."""

    def __init__(self, block_n: int, ctas: int, **epilogue: str | bool):
        self.epilogue = Epilogue(**epilogue)
        self.dtype, self.block_n, self.ctas = self.epilogue.dtype, block_n, ctas
        self.tiler = (ROWS * ctas, block_n, BLOCK_K)
        self.group = tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE
        stage_bytes = 2 * (ROWS + block_n // ctas) * BLOCK_K
        self.stages = min(8, (SHARED_BYTES - 4096) // stage_bytes)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        residual: cute.Pointer,  # as d
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=VECTOR)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mBias, mR, mD = self.epilogue.vectors(bias, residual, d, m, n)
        tiled_mma = cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                self.dtype,
                Float32,
                (*self.tiler[:2], 16),
                self.group,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        a_layout = sm100.make_smem_layout_a(tiled_mma, self.tiler, self.dtype, self.stages)
        b_layout = sm100.make_smem_layout_b(tiled_mma, self.tiler, self.dtype, self.stages)
        load, pair = cpasync.CopyBulkTensorTileG2SOp(self.group), (self.ctas, 1, 1, 1)
        a_atom, tA = make_tiled_tma_atom_A(
            load, mA, cute.select(a_layout, mode=[0, 1, 2]), self.tiler, tiled_mma, pair
        )
        b_atom, tB = make_tiled_tma_atom_B(
            load, mB, cute.select(b_layout, mode=[0, 1, 2]), self.tiler, tiled_mma, pair
        )

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            accumulators: cute.struct.MemRange[cutlass.Int64, 2 * ACCUMULATORS]
            freed: cutlass.Int64
            tensor_memory: Int32

        self.shared_storage = SharedStorage
        tiles_m, tiles_n = cute.ceil_div(m, self.tiler[0]), cute.ceil_div(n, self.block_n)
        self.kernel(
            a_atom, tA, b_atom, tB, mBias, mR, mD, tiled_mma, a_layout, b_layout,
            tiles_m, tiles_n,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        tiles_m: Int32,
        tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        shared = SmemAllocator()
        storage = shared.allocate(self.shared_storage)
        sA = shared.allocate_tensor(self.dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = shared.allocate_tensor(self.dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
        tmem = TmemAllocator(
            storage.tensor_memory.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            is_two_cta=self.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.freed.ptr,
        )
        producer, consumer, issuer, reader = make_rings(
            storage, self.stages, self.dtype, (a_layout, b_layout), self.ctas
        )
        tmem.allocate(ACCUMULATORS * self.block_n)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)

        thr_mma = tiled_mma.get_slice(rank)
        gA = cute.local_tile(mA, (self.tiler[0], BLOCK_K), (None, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK_K), (None, None))
        tCgA, tCgB = thr_mma.partition_A(gA), thr_mma.partition_B(gB)
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        tAsA, tAgA = partition(a_atom, sA, tCgA)
        tBsB, tBgB = partition(b_atom, sB, tCgB)
        acc_shape = tiled_mma.partition_shape_C(self.tiler[:2])
        fragment = tiled_mma.make_fragment_C(cute.append(acc_shape, ACCUMULATORS))
        tCtAcc = cute.make_tensor(tmem_ptr, fragment.layout)  # (MMA, MMA_M, MMA_N, ACCUMULATORS)
        k_tiles = cute.size(gA, mode=[3])
        group_m = GROUP_ROWS // self.tiler[0]
        first = cute.arch.block_idx()[0] // self.ctas
        step = cute.arch.grid_dim()[0] // self.ctas

        if warp_idx == LOAD_WARP:
            for tile in cutlass.range(first, tiles_m * tiles_n, step, unroll=1):
                m_idx, n_idx = grouped(tile, tiles_m, tiles_n, group_m)
                for k_idx in cutlass.range(k_tiles, unroll=1):
                    stage = producer.acquire_and_advance()
                    target, barrier = stage.index, stage.barrier
                    source = tAgA[None, m_idx, k_idx]
                    cute.copy(a_atom, source, tAsA[None, target], tma_bar_ptr=barrier)
                    source = tBgB[None, n_idx, k_idx]
                    cute.copy(b_atom, source, tBsB[None, target], tma_bar_ptr=barrier)
            # A CTA must not exit while products that read its stages may still be running.
            producer.tail()
        elif warp_idx == MMA_WARP:
            if rank == 0:
                for _ in cutlass.range(first, tiles_m * tiles_n, step, unroll=1):
                    accumulator = issuer.acquire_and_advance()
                    tCtTile = tCtAcc[None, None, None, accumulator.index]
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                    for _ in cutlass.range(k_tiles, unroll=1):
                        stage = consumer.wait_and_advance()
                        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                            at = (None, None, block, stage.index)
                            cute.gemm(tiled_mma, tCtTile, tCrA[at], tCrB[at], tCtTile)
                            tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                        stage.release()
                    accumulator.commit()
                issuer.tail()
        else:
            cD = thr_mma.partition_C(cute.make_identity_tensor(self.tiler[:2]))
            for tile in cutlass.range(first, tiles_m * tiles_n, step, unroll=1):
                m_idx, n_idx = grouped(tile, tiles_m, tiles_n, group_m)
                full = reader.wait_and_advance()
                tCtTile = tCtAcc[None, None, None, full.index]
                self.store(tCtTile, cD, mBias, mR, mD, m_idx, n_idx, tidx)
                full.release()
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def store(
        self,
        tCtAcc: cute.Tensor,
        cD: cute.Tensor,
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        m_idx: Int32,
        n_idx: Int32,
        tidx: Int32,
    ):
        """Tensor memory -> registers -> global memory, ``COLUMNS`` of a row at a time."""
        tiled_copy, tDtC, tDcD, values = read_columns(tCtAcc, cD, tidx)
        width = VECTOR * self.epilogue.span
        z = cute.make_rmem_tensor(width, Float32)
        for i in cutlass.range_constexpr(self.block_n // COLUMNS):
            cute.copy(tiled_copy, tDtC[None, None, i], values)
            cute.arch.fence_view_async_tmem_load()
            row, col = tDcD[None, None, i][0]
            row = m_idx * self.tiler[0] + row
            for j in cutlass.range_constexpr(COLUMNS // width):
                vector = (n_idx * self.block_n + col) // width + j
                if row < mD.shape[2] and vector < mD.shape[1]:
                    for v in cutlass.range_constexpr(width):
                        z[v] = values[j * width + v]
                    self.epilogue.store_vector(z, mBias, mR, mD, row, vector)
