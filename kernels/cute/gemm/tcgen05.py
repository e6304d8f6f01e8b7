"""GEMM on Blackwell's tensor cores: TMA in, tcgen05 with the accumulator in tensor memory.

One warp loads, one issues the products, four read the accumulator out of tensor memory, a row a
thread. Never run yet: only compiled, and modelled on CUTLASS's Blackwell tutorial.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.memory import SmemAllocator, TmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.gemm.raster import grouped

BLOCK_M, BLOCK_K = 128, 64
SHARED_BYTES = 227 * 1024
GROUP_M = 16
VECTOR = 8
EPI_WARPS = 4
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 32 * 6
COLUMNS = 32
"""Columns of the accumulator that a thread reads at once."""


class Tcgen05:
    """A CTA makes one tile of 128 x ``block_n``; N and K are multiples of 8."""

    def __init__(self, dtype: str, bias: bool, block_n: int):
        self.dtype, self.has_bias, self.block_n = element_type(dtype), bias, block_n
        self.tiler = (BLOCK_M, block_n, BLOCK_K)
        self.stages = min(8, (SHARED_BYTES - 4096) // (2 * (BLOCK_M + block_n) * BLOCK_K))

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
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=VECTOR)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        row_n = cute.assume(Int64(n), divby=VECTOR)
        vectors = (VECTOR, n // VECTOR, m)
        mD = cute.make_tensor(d, cute.make_layout(vectors, stride=(1, VECTOR, row_n)))
        mBias = cute.make_tensor(bias, cute.make_layout(vectors[:2], stride=(1, VECTOR)))
        tiled_mma = cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                self.dtype,
                Float32,
                (BLOCK_M, self.block_n, 16),
                tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        a_layout = sm100.make_smem_layout_a(tiled_mma, self.tiler, self.dtype, self.stages)
        b_layout = sm100.make_smem_layout_b(tiled_mma, self.tiler, self.dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        a_atom, tA = make_tiled_tma_atom_A(
            load, mA, cute.select(a_layout, mode=[0, 1, 2]), self.tiler, tiled_mma
        )
        b_atom, tB = make_tiled_tma_atom_B(
            load, mB, cute.select(b_layout, mode=[0, 1, 2]), self.tiler, tiled_mma
        )

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            accumulator: cute.struct.MemRange[cutlass.Int64, 2]
            tensor_memory: Int32

        self.shared_storage = SharedStorage
        tiles_m, tiles_n = cute.ceil_div(m, BLOCK_M), cute.ceil_div(n, self.block_n)
        self.kernel(
            a_atom, tA, b_atom, tB, mBias, mD, tiled_mma, a_layout, b_layout, tiles_m, tiles_n
        ).launch(grid=(tiles_m * tiles_n, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,
        mBias: cute.Tensor,
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
        sA = shared.allocate_tensor(self.dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = shared.allocate_tensor(self.dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
        tmem = TmemAllocator(
            storage.tensor_memory.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
        )
        tmem.allocate(self.block_n)
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)

        tx_bytes = cute.size_in_bytes(self.dtype, cute.select(a_layout, mode=[0, 1, 2]))
        tx_bytes += cute.size_in_bytes(self.dtype, cute.select(b_layout, mode=[0, 1, 2]))
        one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        producer, consumer = pipeline.PipelineTmaUmma.create(
            num_stages=self.stages,
            producer_group=one_thread,
            consumer_group=one_thread,
            tx_count=tx_bytes,
            barrier_storage=storage.stages.data_ptr(),
        ).make_participants()
        issuer, reader = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one_thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * EPI_WARPS),
            barrier_storage=storage.accumulator.data_ptr(),
        ).make_participants()

        thr_mma = tiled_mma.get_slice(0)
        gA = cute.local_tile(mA, (BLOCK_M, BLOCK_K), (m_idx, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK_K), (n_idx, None))
        tCgA, tCgB = thr_mma.partition_A(gA), thr_mma.partition_B(gB)
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        one = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(
            a_atom, 0, one, cute.group_modes(sA, 0, 3), cute.group_modes(tCgA, 0, 3)
        )
        tBsB, tBgB = cpasync.tma_partition(
            b_atom, 0, one, cute.group_modes(sB, 0, 3), cute.group_modes(tCgB, 0, 3)
        )
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)
        fragment = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tiler[:2]))
        tCtAcc = cute.make_tensor(tmem_ptr, fragment.layout)
        k_tiles = cute.size(gA, mode=[2])

        if warp_idx == LOAD_WARP:
            for _ in cutlass.range(k_tiles, unroll=1):
                stage = producer.acquire_and_advance()
                source, target, barrier = stage.count, stage.index, stage.barrier
                cute.copy(a_atom, tAgA[None, source], tAsA[None, target], tma_bar_ptr=barrier)
                cute.copy(b_atom, tBgB[None, source], tBsB[None, target], tma_bar_ptr=barrier)
            producer.tail()
        elif warp_idx == MMA_WARP:
            accumulator = issuer.acquire_and_advance()
            tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(k_tiles, unroll=1):
                stage = consumer.wait_and_advance()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    at = (None, None, block, stage.index)
                    cute.gemm(tiled_mma, tCtAcc, tCrA[at], tCrB[at], tCtAcc)
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                stage.release()
            accumulator.commit()
        else:
            full = reader.wait_and_advance()
            cD = thr_mma.partition_C(cute.make_identity_tensor((BLOCK_M, self.block_n)))
            self.store(tCtAcc, cD, mBias, mD, m_idx, n_idx, tidx)
            full.release()
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def store(
        self,
        tCtAcc: cute.Tensor,
        cD: cute.Tensor,
        mBias: cute.Tensor,  # (VECTOR, n / VECTOR)
        mD: cute.Tensor,  # (VECTOR, n / VECTOR, m)
        m_idx: Int32,
        n_idx: Int32,
        tidx: Int32,
    ):
        """Tensor memory -> registers -> global memory, ``COLUMNS`` of a row at a time."""
        part = ((BLOCK_M, COLUMNS),)
        acc_parts, c_parts = cute.zipped_divide(tCtAcc, part), cute.zipped_divide(cD, part)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32)
        tiled_copy = tcgen05.make_tmem_copy(atom, acc_parts[None, 0])
        thr_copy = tiled_copy.get_slice(tidx)
        tDtC, tDcD = thr_copy.partition_S(acc_parts), thr_copy.partition_D(c_parts)
        values = cute.make_rmem_tensor(tDcD[None, None, 0].shape, Float32)
        total = cute.make_rmem_tensor(VECTOR, Float32)
        out = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(self.block_n // COLUMNS):
            cute.copy(tiled_copy, tDtC[None, None, i], values)
            cute.arch.fence_view_async_tmem_load()
            row, col = tDcD[None, None, i][0]
            row = m_idx * BLOCK_M + row
            for j in cutlass.range_constexpr(COLUMNS // VECTOR):
                vector = (n_idx * self.block_n + col) // VECTOR + j
                if row < mD.shape[2] and vector < mD.shape[1]:
                    for v in cutlass.range_constexpr(VECTOR):
                        total[v] = values[j * VECTOR + v]
                    if cutlass.const_expr(self.has_bias):
                        cute.autovec_copy(mBias[None, vector], out)
                        total.store(total.load() + out.load().to(Float32))
                    out.store(total.load().to(self.dtype))
                    cute.autovec_copy(out, mD[None, vector, row])
