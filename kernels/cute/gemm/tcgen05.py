"""GEMM on Blackwell's tensor cores: TMA in, tcgen05 with two accumulators in tensor memory.

Persistent; the roles of the warps and their barriers are in ``common/tensor_memory.py``. With
``ctas`` = 2 a pair of SMs works as one: each holds half of the tile's rows and half of B, and the
first one issues the products of both. Only compiled, never run yet; modelled on CUTLASS's
persistent Blackwell GEMM.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import VECTOR, Epilogue
from kernelcat.kernels.cute.common.ring import SHARED_BYTES, Operand, load
from kernelcat.kernels.cute.common.tensor_memory import (
    COLUMNS,
    LOAD_WARP,
    MMA_WARP,
    NUM_ACCUMULATORS,
    RESERVED_BYTES,
    ROWS,
    THREADS,
    cta_group,
    make_allocator,
    make_operands,
    make_rings,
    read_columns,
)
from kernelcat.kernels.cute.common.tile_order import grouped_tile
from kernelcat.kernels.cute.common.tma import partition

BLOCK_K = 64
MAX_STAGES = 8
GROUP_ROWS = 2048
"""Rows of D that are computed before the next column of tiles."""


class Tcgen05:
    """Tiles of 128 * ``ctas`` x ``block_n``; N and K are multiples of 8."""

    def __init__(self, block_n: int, ctas: int, **epilogue: str | bool):
        self.epilogue = Epilogue(**epilogue)
        self.dtype, self.block_n, self.ctas = self.epilogue.dtype, block_n, ctas
        self.tiler = (ROWS * ctas, block_n, BLOCK_K)
        self.stage_bytes = 2 * (ROWS + block_n // ctas) * BLOCK_K
        self.num_stages = min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES) // self.stage_bytes)

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
                cta_group(self.ctas),
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        (a_layout, a_atom, tA), (b_layout, b_atom, tB) = make_operands(
            tiled_mma, self.tiler, self.dtype, self.num_stages, mA, mB, self.ctas
        )

        @cute.struct
        class SharedStorage:
            stages: cute.struct.MemRange[cutlass.Int64, 2 * self.num_stages]
            accumulators: cute.struct.MemRange[cutlass.Int64, 2 * NUM_ACCUMULATORS]
            freed: cutlass.Int64
            tensor_memory: Int32

        self.shared_storage = SharedStorage
        num_tiles_m, num_tiles_n = cute.ceil_div(m, self.tiler[0]), cute.ceil_div(n, self.block_n)
        self.kernel(
            a_atom, tA, b_atom, tB, mBias, mR, mD, tiled_mma, a_layout, b_layout,
            num_tiles_m, num_tiles_n,
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
        mA: cute.Tensor,  # (m, k), coordinates for TMA
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,  # (n, k), coordinates for TMA
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
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
        tmem = make_allocator(storage, self.ctas)
        producer, consumer, issuer, reader = make_rings(
            storage, self.num_stages, self.stage_bytes, ctas=self.ctas
        )
        tmem.allocate(NUM_ACCUMULATORS * self.block_n)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)

        thr_mma = tiled_mma.get_slice(rank)
        gA = cute.local_tile(mA, (self.tiler[0], BLOCK_K), (None, None))
        gB = cute.local_tile(mB, (self.block_n, BLOCK_K), (None, None))
        tCgA, tCgB = thr_mma.partition_A(gA), thr_mma.partition_B(gB)
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        a = Operand(a_atom, *partition(a_atom, sA, tCgA), None)
        b = Operand(b_atom, *partition(b_atom, sB, tCgB), None)
        acc_shape = tiled_mma.partition_shape_C(self.tiler[:2])
        fragment = tiled_mma.make_fragment_C(cute.append(acc_shape, NUM_ACCUMULATORS))
        tCtAcc = cute.make_tensor(tmem_ptr, fragment.layout)  # (MMA, MMA_M, MMA_N, accumulators)
        num_k_blocks = cute.size(gA, mode=[3])
        group_m = GROUP_ROWS // self.tiler[0]
        first = cute.arch.block_idx()[0] // self.ctas
        step = cute.arch.grid_dim()[0] // self.ctas

        if warp_idx == LOAD_WARP:
            for tile in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
                m_idx, n_idx = grouped_tile(tile, num_tiles_m, num_tiles_n, group_m)
                for k_idx in cutlass.range(num_k_blocks, unroll=1):
                    stage = producer.acquire_and_advance()
                    load(a, m_idx, k_idx, stage.index, stage.barrier)
                    load(b, n_idx, k_idx, stage.index, stage.barrier)
            # A thread block must not exit while products that read its stages may be running.
            producer.tail()
        elif warp_idx == MMA_WARP:
            if rank == 0:
                for _ in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
                    accumulator = issuer.acquire_and_advance()
                    tCtTile = tCtAcc[None, None, None, accumulator.index]
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                    for _ in cutlass.range(num_k_blocks, unroll=1):
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
            for tile in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
                m_idx, n_idx = grouped_tile(tile, num_tiles_m, num_tiles_n, group_m)
                accumulator = reader.wait_and_advance()
                tCtTile = tCtAcc[None, None, None, accumulator.index]
                self.store(tCtTile, cD, mBias, mR, mD, m_idx, n_idx, tidx)
                accumulator.release()
        cute.arch.sync_threads()
        tmem.relinquish_alloc_permit()
        tmem.free(tmem_ptr)

    @cute.jit
    def store(
        self,
        tCtAcc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        cD: cute.Tensor,  # coordinates in the tile, like tCtAcc
        mBias: cute.Tensor,  # (8, n / 8)
        mR: cute.Tensor,  # (8, columns of D / 8, m)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        m_idx: Int32,
        n_idx: Int32,
        tidx: Int32,
    ):
        """Tensor memory -> registers -> global memory, ``COLUMNS`` of a row at a time."""
        tiled_copy, tDtC, tDcD, columns = read_columns(tCtAcc, cD, tidx)
        for i in cutlass.range_constexpr(self.block_n // COLUMNS):
            cute.copy(tiled_copy, tDtC[None, None, i], columns)
            cute.arch.fence_view_async_tmem_load()
            row, col = tDcD[None, None, i][0]
            row, col = m_idx * self.tiler[0] + row, n_idx * self.block_n + col
            self.epilogue.store_columns(columns, mBias, mR, mD, row, col)
