"""Block-scaled FP8 GEMM on Blackwell's tensor cores: TMA in, tcgen05, sums promoted to registers.

One warp loads, one issues the products of 128 columns each into alternating accumulators in tensor
memory, four read them, a row a thread, and add them, scaled, to float32 registers. Never run yet:
only compiled, and modelled on CUTLASS's Blackwell tutorial.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.memory import SmemAllocator, TmemAllocator

from kernelcat.kernels.cute.common.tensor_memory import (
    ACCUMULATORS,
    COLUMNS,
    LOAD_WARP,
    MMA_WARP,
    THREADS,
    make_rings,
    read_columns,
)
from kernelcat.kernels.cute.common.tile_order import grouped
from kernelcat.kernels.cute.common.tma import partition

BLOCK = 128
"""Rows of a tile, columns of a stage, and what shares a scale."""

SHARED_BYTES = 227 * 1024
GROUP_M = 16
VECTOR = 8


class Tcgen05:
    """A CTA makes one tile of 128 x ``block_n``, 64 or 128; N is a multiple of 8 and K of 16."""

    def __init__(self, block_n: int):
        self.block_n = block_n
        self.tiler = (BLOCK, block_n, BLOCK)
        self.stages = min(8, (SHARED_BYTES - 4096) // ((BLOCK + block_n) * BLOCK))

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        a_scale: cute.Pointer,  # (k_blocks, m)
        b: cute.Pointer,  # (n, k)
        b_scale: cute.Pointer,  # (n_blocks, k_blocks)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=16)
        k_blocks, n_blocks = cute.ceil_div(k, BLOCK), cute.ceil_div(n, BLOCK)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mSA = cute.make_tensor(a_scale, cute.make_layout((m, k_blocks), stride=(1, Int64(m))))
        mSB = cute.make_tensor(
            b_scale, cute.make_layout((n_blocks, k_blocks), stride=(Int64(k_blocks), 1))
        )
        row_n = cute.assume(Int64(n), divby=VECTOR)
        vectors = (VECTOR, n // VECTOR, m)
        mD = cute.make_tensor(d, cute.make_layout(vectors, stride=(1, VECTOR, row_n)))
        tiled_mma = cute.make_tiled_mma(
            tcgen05.MmaF8F6F4Op(
                Float8E4M3FN,
                Float8E4M3FN,
                Float32,
                (BLOCK, self.block_n, 32),
                tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        a_layout = sm100.make_smem_layout_a(tiled_mma, self.tiler, Float8E4M3FN, self.stages)
        b_layout = sm100.make_smem_layout_b(tiled_mma, self.tiler, Float8E4M3FN, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        a_atom, tA = make_tiled_tma_atom_A(
            load, mA, cute.select(a_layout, mode=[0, 1, 2]), self.tiler, tiled_mma
        )
        b_atom, tB = make_tiled_tma_atom_B(
            load, mB, cute.select(b_layout, mode=[0, 1, 2]), self.tiler, tiled_mma
        )

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[Int64, 2 * self.stages]
            accumulators: cute.struct.MemRange[Int64, 2 * ACCUMULATORS]
            tensor_memory: Int32

        self.shared_storage = SharedStorage
        tiles_m, tiles_n = cute.ceil_div(m, BLOCK), cute.ceil_div(n, self.block_n)
        self.kernel(
            a_atom, tA, mSA, b_atom, tB, mSB, mD, tiled_mma, a_layout, b_layout, tiles_m, tiles_n
        ).launch(grid=(tiles_m * tiles_n, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,
        mSA: cute.Tensor,
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,
        mSB: cute.Tensor,
        mD: cute.Tensor,
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        tiles_m: Int32,
        tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m_idx, n_idx = grouped(cute.arch.block_idx()[0], tiles_m, tiles_n, GROUP_M)
        shared = SmemAllocator()
        storage = shared.allocate(self.shared_storage)
        sA = shared.allocate_tensor(Float8E4M3FN, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = shared.allocate_tensor(Float8E4M3FN, b_layout.outer, 1024, swizzle=b_layout.inner)
        tmem = TmemAllocator(
            storage.tensor_memory.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
        )
        tmem.allocate(ACCUMULATORS * self.block_n)
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)

        producer, consumer, issuer, reader = make_rings(
            storage, self.stages, Float8E4M3FN, (a_layout, b_layout)
        )

        thr_mma = tiled_mma.get_slice(0)
        gA = cute.local_tile(mA, (BLOCK, BLOCK), (m_idx, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK), (n_idx, None))
        tCgA, tCgB = thr_mma.partition_A(gA), thr_mma.partition_B(gB)
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        tAsA, tAgA = partition(a_atom, sA, tCgA)
        tBsB, tBgB = partition(b_atom, sB, tCgB)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)
        shape = cute.append(tiled_mma.partition_shape_C(self.tiler[:2]), ACCUMULATORS)
        tCtAcc = cute.make_tensor(tmem_ptr, tiled_mma.make_fragment_C(shape).layout)
        k_blocks = cute.size(gA, mode=[2])

        if warp_idx == LOAD_WARP:
            for _ in cutlass.range(k_blocks, unroll=1):
                stage = producer.acquire_and_advance()
                source, target, barrier = stage.count, stage.index, stage.barrier
                cute.copy(a_atom, tAgA[None, source], tAsA[None, target], tma_bar_ptr=barrier)
                cute.copy(b_atom, tBgB[None, source], tBsB[None, target], tma_bar_ptr=barrier)
            producer.tail()
        elif warp_idx == MMA_WARP:
            for _ in cutlass.range(k_blocks, unroll=1):
                stage = consumer.wait_and_advance()
                accumulator = issuer.acquire_and_advance()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, block > 0)
                    at = (None, None, block, stage.index)
                    acc = tCtAcc[None, None, None, accumulator.index]
                    cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
                stage.release()
                accumulator.commit()
        else:
            cD = thr_mma.partition_C(cute.make_identity_tensor((BLOCK, self.block_n)))
            tiled_copy, tDtC, tDcD, values = read_columns(
                tCtAcc[None, 0, 0, None], cD, tidx
            )
            num_parts = self.block_n // COLUMNS
            total = cute.make_rmem_tensor((COLUMNS, num_parts), Float32)
            total.fill(0.0)
            row = m_idx * BLOCK + tDcD[None, None, 0][0][0]
            gSA = mSA[cutlass.min(row, mSA.shape[0] - 1), None]
            gSB = mSB[n_idx * self.block_n // BLOCK, None]
            scale = gSA[0] * gSB[0]
            for k_idx in cutlass.range(k_blocks, unroll=1):
                ahead = cutlass.min(k_idx + 1, k_blocks - 1)
                scale_a, scale_b = gSA[ahead], gSB[ahead]
                full = reader.wait_and_advance()
                for i in cutlass.range_constexpr(num_parts):
                    cute.copy(tiled_copy, tDtC[None, None, i + full.index * num_parts], values)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(i == num_parts - 1):
                        full.release()
                    for j in cutlass.range_constexpr(COLUMNS):
                        total[j, i] += scale * values[j]
                scale = scale_a * scale_b
            self.store(total, mD, row, n_idx)
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def store(
        self,
        total: cute.Tensor,  # (COLUMNS, block_n / COLUMNS): a row of the tile
        mD: cute.Tensor,  # (VECTOR, n / VECTOR, m)
        row: Int32,
        n_idx: Int32,
    ):
        """Registers -> global memory, eight elements at a time."""
        out = cute.make_rmem_tensor(VECTOR, BFloat16)
        for i in cutlass.range_constexpr(self.block_n // VECTOR):
            vector = n_idx * (self.block_n // VECTOR) + i
            if row < mD.shape[2] and vector < mD.shape[1]:
                for v in cutlass.range_constexpr(VECTOR):
                    out[v] = total[i * VECTOR + v].to(BFloat16)
                cute.autovec_copy(out, mD[None, vector, row])
