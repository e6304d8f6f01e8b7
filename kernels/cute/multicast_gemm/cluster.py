"""GEMM on Hopper by clusters of thread blocks: persistent, warp-specialized, TMA in and out.

The thread blocks of a cluster compute ``cluster_m`` x ``cluster_n`` neighbouring tiles. Tiles in a
row need the same rows of A, tiles in a column the same rows of B. With ``multicast`` a thread block
loads a slice of an operand that others need too, and TMA writes the slice to all of them; without,
it loads its operands whole. A thread block whose tile lies outside of D works nevertheless: others
need what it loads.

    barrier       who arrives (how many)                     who waits         for what
    full[stage]   producer (1) and TMA, bytes                consumers         a k-block has arrived
    empty[stage]  consumer warps (8) of each thread block    producer          the stage may be
                  that gets a slice of what is loaded                          overwritten
    part          consumers (256, named)                     the same threads  a part of D is
                                                                               written, a stage free

The pipeline is CUTLASS's.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.epilogue import VECTOR
from kernelcat.kernels.cute.common.mainloop import drain, make_mma, multiply
from kernelcat.kernels.cute.common.ring import (
    SHARED_BYTES,
    load,
    make_ring,
    memory,
    operand,
    stage_layouts,
)
from kernelcat.kernels.cute.common.stmatrix import registers_to_shared
from kernelcat.kernels.cute.common.tile_order import grouped_tile
from kernelcat.kernels.cute.common.tma import load_atom, store_atom

BLOCK_K = 64
MAX_STAGES = 8
GROUP_M = 8
"""Rows of tiles that are computed before the next column of tiles."""
RESERVED_BYTES = 2048
"""Shared memory that is left to barriers and to the alignment of stages."""
WARPGROUPS = 2
MMA_THREADS = 128 * WARPGROUPS
THREADS = MMA_THREADS + 128
PRODUCER_WARP = MMA_THREADS // 32
PART = (64 * WARPGROUPS, 64)
"""Rows and columns of D that are stored at a time."""
PART_STAGES = 2


class Cluster:
    """D = A @ B^T in tiles of ``block_m`` x ``block_n``; N and K are multiples of 8."""

    def __init__(
        self,
        dtype: str,
        block_m: int,
        block_n: int,
        cluster_m: int,
        cluster_n: int,
        multicast: bool,
    ):
        self.dtype = element_type(dtype)
        self.block_m, self.block_n = block_m, block_n
        self.cluster_m, self.cluster_n = cluster_m, cluster_n
        self.group_m = GROUP_M // cluster_m
        self.num_sharers_a, self.num_sharers_b = (cluster_n, cluster_m) if multicast else (1, 1)
        # The thread blocks of the cluster's first row and first column of tiles, a bit each.
        self.row_mask = sum(1 << (i * cluster_m) for i in range(cluster_n))
        self.column_mask = (1 << cluster_m) - 1
        part_bytes = 2 * PART_STAGES * PART[0] * PART[1]
        stage_bytes = 2 * (block_m + block_n) * BLOCK_K
        free = SHARED_BYTES - RESERVED_BYTES - part_bytes
        self.num_stages = min(MAX_STAGES, free // stage_bytes)
        self.part_barrier = pipeline.NamedBarrier(barrier_id=1, num_threads=MMA_THREADS)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        num_clusters: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=VECTOR), cute.assume(k, divby=VECTOR)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(n, 1)))
        num_tiles_m = cute.ceil_div(m, self.block_m * self.cluster_m)
        num_tiles_n = cute.ceil_div(n, self.block_n * self.cluster_n)

        tiled_mma = make_mma(self.dtype, WARPGROUPS, self.block_n)
        tile = (self.block_m, self.block_n, BLOCK_K)
        a_layout, b_layout = stage_layouts(tile, self.dtype, self.num_stages)
        d_layout = sm90.make_smem_layout_epi(
            self.dtype, LayoutEnum.ROW_MAJOR, PART, PART_STAGES
        )
        a_atom, tA = load_atom(mA, a_layout, (self.block_m, BLOCK_K), self.num_sharers_a)
        b_atom, tB = load_atom(mB, b_layout, (self.block_n, BLOCK_K), self.num_sharers_b)
        d_atom, tD = store_atom(mD, d_layout, PART)

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.num_stages]
            a: memory(self.dtype, a_layout)
            b: memory(self.dtype, b_layout)
            d: memory(self.dtype, d_layout)

        self.shared_storage = SharedStorage
        cluster_size = self.cluster_m * self.cluster_n
        self.kernel(
            a_atom, tA, b_atom, tB, d_atom, tD,
            tiled_mma, a_layout, b_layout, d_layout, num_tiles_m, num_tiles_n,
        ).launch(
            grid=(num_clusters * cluster_size, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(cluster_size, 1, 1),
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
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,  # (m, n), coordinates for TMA
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        d_layout: cute.ComposedLayout,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % self.cluster_m, rank // self.cluster_m
        if warp_idx == PRODUCER_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(d_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sD = storage.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
        num_releases = 4 * WARPGROUPS * (self.num_sharers_a + self.num_sharers_b - 1)
        ring = make_ring(
            storage.barriers,
            self.num_stages,
            self.dtype,
            (a_layout, b_layout),
            num_releases,
            cluster=(self.num_sharers_b, self.num_sharers_a),
        )

        cluster_size = self.cluster_m * self.cluster_n
        first = cute.arch.block_idx()[0] // cluster_size
        step = cute.arch.grid_dim()[0] // cluster_size
        tiles = first, num_tiles_m * num_tiles_n, step
        num_k_blocks = cute.ceil_div(mA.shape[1], BLOCK_K)

        if warp_idx >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(40)
            if warp_idx == PRODUCER_WARP:
                self.produce(
                    a_atom, mA, b_atom, mB, sA, sB, ring, tiles, num_tiles_m, num_tiles_n,
                    num_k_blocks, rank_m, rank_n,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(232)
            self.consume(
                tiled_mma, sA, sB, sD, d_atom, mD, ring, tiles, num_tiles_m, num_tiles_n,
                num_k_blocks, rank_m, rank_n, tidx, warp_idx,
            )  # fmt: skip

    @cute.jit
    def produce(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,  # (m, k), coordinates for TMA
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,  # (n, k), coordinates for TMA
        sA: cute.Tensor,  # (block_m, BLOCK_K, stages)
        sB: cute.Tensor,  # (block_n, BLOCK_K, stages)
        ring: pipeline.PipelineTmaAsync,
        tiles: tuple[Int32, Int32, Int32],  # the first one, the end, the step
        num_tiles_m: Int32,
        num_tiles_n: Int32,
        num_k_blocks: Int32,
        rank_m: Int32,
        rank_n: Int32,
    ):
        """The producer warp: loads the k-blocks of all tiles of this thread block."""
        first, end, step = tiles
        a = operand(
            a_atom, sA, mA, (self.block_m, BLOCK_K),
            self.num_sharers_a, rank_n, self.row_mask << rank_m,
        )  # fmt: skip
        b = operand(
            b_atom, sB, mB, (self.block_n, BLOCK_K),
            self.num_sharers_b, rank_m, self.column_mask << (rank_n * self.cluster_m),
        )  # fmt: skip
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        for index in cutlass.range(first, end, step, unroll=1):
            m_idx, n_idx = self.tile_of(index, num_tiles_m, num_tiles_n, rank_m, rank_n)
            for k_idx in cutlass.range(num_k_blocks, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                load(a, m_idx, k_idx, state.index, barrier)
                load(b, n_idx, k_idx, state.index, barrier)
                state.advance()
        # A thread block must not exit while others may still arrive at its barriers.
        ring.producer_tail(state)

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,  # (block_m, BLOCK_K, stages)
        sB: cute.Tensor,  # (block_n, BLOCK_K, stages)
        sD: cute.Tensor,  # (128, 64, PART_STAGES)
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,  # (m, n), coordinates for TMA
        ring: pipeline.PipelineTmaAsync,
        tiles: tuple[Int32, Int32, Int32],  # the first one, the end, the step
        num_tiles_m: Int32,
        num_tiles_n: Int32,
        num_k_blocks: Int32,
        rank_m: Int32,
        rank_n: Int32,
        tidx: Int32,
        warp_idx: Int32,
    ):
        """The consumer warpgroups: multiply and store."""
        first, end, step = tiles
        group = cute.arch.make_warp_uniform(tidx // 128)
        thr_mma = tiled_mma.get_slice(cute.make_layout(WARPGROUPS, stride=128)(group))
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
        acc_shape = tiled_mma.partition_shape_C((self.block_m, self.block_n))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        for index in cutlass.range(first, end, step, unroll=1):
            m_idx, n_idx = self.tile_of(index, num_tiles_m, num_tiles_n, rank_m, rank_n)
            acc.fill(0.0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            read, release = multiply(
                tiled_mma, acc, tCrA, tCrB, ring, read, release, 0, num_k_blocks
            )
            release = drain(ring, release)
            gD = cute.local_tile(mD, (self.block_m, self.block_n), (m_idx, n_idx))
            self.store_tile(acc, tiled_mma, sD, gD, d_atom, tidx, warp_idx)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def tile_of(
        self, index: Int32, num_tiles_m: Int32, num_tiles_n: Int32, rank_m: Int32, rank_n: Int32
    ):
        """Row and column, in tiles, of this thread block's tile in the cluster's tile ``index``."""
        row, col = grouped_tile(index, num_tiles_m, num_tiles_n, self.group_m)
        return row * self.cluster_m + rank_m, col * self.cluster_n + rank_n

    @cute.jit
    def store_tile(
        self,
        acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
        tiled_mma: cute.TiledMma,
        sD: cute.Tensor,  # (128, 64, PART_STAGES)
        gD: cute.Tensor,  # (block_m, block_n), coordinates for TMA
        d_atom: cute.CopyAtom,
        tidx: Int32,
        warp_idx: Int32,
    ):
        """Accumulators -> 16 bits -> shared memory -> TMA, a ``PART`` at a time."""
        r2s, tRS_rD, tRS_sD = registers_to_shared(tiled_mma, sD, tidx, self.dtype)
        tRS_rAcc = r2s.retile(acc)
        num_values = cute.size(tRS_rD)
        bSG_sD, bSG_gD = cpasync.tma_partition(
            d_atom, 0, cute.make_layout(1),
            cute.group_modes(sD, 0, 2), cute.zipped_divide(gD, PART),
        )  # fmt: skip
        num_cols = self.block_n // PART[1]
        num_parts = self.block_m // PART[0] * num_cols
        for part in cutlass.range_constexpr(num_parts):
            stage = part % PART_STAGES
            if warp_idx == 0:  # wait until the last store from this stage has read it
                cute.arch.cp_async_bulk_wait_group(0 if part == 0 else PART_STAGES - 1, read=True)
            self.part_barrier.arrive_and_wait()
            for i in cutlass.range_constexpr(num_values):
                tRS_rD[i] = tRS_rAcc[part * num_values + i].to(self.dtype)
            cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, stage])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.part_barrier.arrive_and_wait()
            if warp_idx == 0:
                cute.copy(
                    d_atom, bSG_sD[None, stage], bSG_gD[None, (part // num_cols, part % num_cols)]
                )
                cute.arch.cp_async_bulk_commit_group()
