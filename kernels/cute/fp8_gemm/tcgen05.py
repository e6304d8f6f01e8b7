"""Block-scaled FP8 GEMM on Blackwell's tensor cores: TMA in, tcgen05, sums promoted to registers.

The roles of the warps and their barriers are in ``common/tensor_memory.py``. The products of each
k-block, 128 columns with one scale, go into alternating accumulators in tensor memory. The threads
that read them add them, scaled, to float32 registers. Only compiled, never run yet; modelled on
CUTLASS's Blackwell tutorial.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import VECTOR
from kernelcat.kernels.cute.common.ring import SHARED_BYTES
from kernelcat.kernels.cute.common.tensor_memory import (
    COLUMNS,
    LOAD_WARP,
    MMA_WARP,
    NUM_ACCUMULATORS,
    RESERVED_BYTES,
    THREADS,
    cta_group,
    make_allocator,
    make_operands,
    make_rings,
    read_columns,
)
from kernelcat.kernels.cute.common.tile_order import grouped_tile
from kernelcat.kernels.cute.common.tma import partition

BLOCK = 128
"""Rows of a tile; columns of a stage; rows of B and columns of A and B that share a scale."""

MAX_STAGES = 8
GROUP_M = 16


class Tcgen05:
    """A thread block computes one tile of 128 x ``block_n``, 64 or 128.

    N is a multiple of 8 and K of 16.
    """

    def __init__(self, block_n: int):
        self.block_n = block_n
        self.tiler = (BLOCK, block_n, BLOCK)
        self.stage_bytes = (BLOCK + block_n) * BLOCK
        self.num_stages = min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES) // self.stage_bytes)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        a_scale: cute.Pointer,  # (num_k_blocks, m)
        b: cute.Pointer,  # (n, k)
        b_scale: cute.Pointer,  # (num_n_blocks, num_k_blocks)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=16)
        num_k_blocks, num_n_blocks = cute.ceil_div(k, BLOCK), cute.ceil_div(n, BLOCK)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mSA = cute.make_tensor(a_scale, cute.make_layout((m, num_k_blocks), stride=(1, Int64(m))))
        b_blocks = cute.make_layout((num_n_blocks, num_k_blocks), stride=(Int64(num_k_blocks), 1))
        mSB = cute.make_tensor(b_scale, b_blocks)
        stride = cute.assume(Int64(n), divby=VECTOR)
        vectors = (VECTOR, n // VECTOR, m)
        mD = cute.make_tensor(d, cute.make_layout(vectors, stride=(1, VECTOR, stride)))
        tiled_mma = cute.make_tiled_mma(
            tcgen05.MmaF8F6F4Op(
                Float8E4M3FN,
                Float8E4M3FN,
                Float32,
                (BLOCK, self.block_n, 32),
                cta_group(1),
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        (a_layout, a_atom, tA), (b_layout, b_atom, tB) = make_operands(
            tiled_mma, self.tiler, Float8E4M3FN, self.num_stages, mA, mB, ctas=1
        )

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[Int64, 2 * self.num_stages]
            accumulators: cute.struct.MemRange[Int64, 2 * NUM_ACCUMULATORS]
            tensor_memory: Int32

        self.shared_storage = SharedStorage
        num_tiles_m, num_tiles_n = cute.ceil_div(m, BLOCK), cute.ceil_div(n, self.block_n)
        self.kernel(
            a_atom, tA, mSA, b_atom, tB, mSB, mD, tiled_mma, a_layout, b_layout,
            num_tiles_m, num_tiles_n,
        ).launch(
            grid=(num_tiles_m * num_tiles_n, 1, 1), block=(THREADS, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,  # (m, k), coordinates for TMA
        mSA: cute.Tensor,  # (m, num_k_blocks)
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,  # (n, k), coordinates for TMA
        mSB: cute.Tensor,  # (num_n_blocks, num_k_blocks)
        mD: cute.Tensor,  # (8, n / 8, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m_idx, n_idx = grouped_tile(cute.arch.block_idx()[0], num_tiles_m, num_tiles_n, GROUP_M)
        shared = SmemAllocator()
        storage = shared.allocate(self.shared_storage)
        sA = shared.allocate_tensor(Float8E4M3FN, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = shared.allocate_tensor(Float8E4M3FN, b_layout.outer, 1024, swizzle=b_layout.inner)
        tmem = make_allocator(storage)
        tmem.allocate(NUM_ACCUMULATORS * self.block_n)
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)

        producer, consumer, issuer, reader = make_rings(storage, self.num_stages, self.stage_bytes)

        thr_mma = tiled_mma.get_slice(0)
        gA = cute.local_tile(mA, (BLOCK, BLOCK), (m_idx, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK), (n_idx, None))
        tCgA, tCgB = thr_mma.partition_A(gA), thr_mma.partition_B(gB)
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        tAsA, tAgA = partition(a_atom, sA, tCgA)
        tBsB, tBgB = partition(b_atom, sB, tCgB)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)
        shape = cute.append(tiled_mma.partition_shape_C(self.tiler[:2]), NUM_ACCUMULATORS)
        tCtAcc = cute.make_tensor(tmem_ptr, tiled_mma.make_fragment_C(shape).layout)
        num_k_blocks = cute.size(gA, mode=[2])

        if warp_idx == LOAD_WARP:
            for _ in cutlass.range(num_k_blocks, unroll=1):
                stage = producer.acquire_and_advance()
                k_idx, target, barrier = stage.count, stage.index, stage.barrier
                cute.copy(a_atom, tAgA[None, k_idx], tAsA[None, target], tma_bar_ptr=barrier)
                cute.copy(b_atom, tBgB[None, k_idx], tBsB[None, target], tma_bar_ptr=barrier)
            producer.tail()
        elif warp_idx == MMA_WARP:
            for _ in cutlass.range(num_k_blocks, unroll=1):
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
            tiled_copy, tDtC, tDcD, columns = read_columns(
                tCtAcc[None, 0, 0, None], cD, tidx
            )
            num_parts = self.block_n // COLUMNS
            total = cute.make_rmem_tensor((COLUMNS, num_parts), Float32)
            total.fill(0.0)
            row = m_idx * BLOCK + tDcD[None, None, 0][0][0]
            gSA = mSA[cutlass.min(row, mSA.shape[0] - 1), None]
            gSB = mSB[n_idx * self.block_n // BLOCK, None]
            scale = gSA[0] * gSB[0]
            for k_idx in cutlass.range(num_k_blocks, unroll=1):
                ahead = cutlass.min(k_idx + 1, num_k_blocks - 1)
                scale_a, scale_b = gSA[ahead], gSB[ahead]
                accumulator = reader.wait_and_advance()
                for i in cutlass.range_constexpr(num_parts):
                    part = i + accumulator.index * num_parts
                    cute.copy(tiled_copy, tDtC[None, None, part], columns)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(i == num_parts - 1):
                        accumulator.release()
                    for j in cutlass.range_constexpr(COLUMNS):
                        total[j, i] += scale * columns[j]
                scale = scale_a * scale_b
            self.store(total, mD, row, n_idx)
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def store(
        self,
        total: cute.Tensor,  # (COLUMNS, block_n / COLUMNS): a row of the tile
        mD: cute.Tensor,  # (8, n / 8, m)
        row: Int32,
        n_idx: Int32,
    ):
        """Registers -> global memory, a vector at a time."""
        out = cute.make_rmem_tensor(VECTOR, BFloat16)
        for i in cutlass.range_constexpr(self.block_n // VECTOR):
            vector = n_idx * (self.block_n // VECTOR) + i
            if row < mD.shape[2] and vector < mD.shape[1]:
                for v in cutlass.range_constexpr(VECTOR):
                    out[v] = total[i * VECTOR + v].to(BFloat16)
                cute.autovec_copy(out, mD[None, vector, row])
