"""Block-scaled FP8 GEMM on Hopper's tensor cores: persistent, warp-specialized, TMA in and out.

One producer warp keeps a ring of stages full. TMA loads the operands, cp.async their scales, which
need no alignment; both arrive at the stage's full barrier. A stage has 128 columns, for which each
row of A has one scale and 128 rows of B share one. Warpgroups run WGMMA on a stage and then
*promote* the accumulators: add them, scaled, to float32 sums in registers. While one warpgroup
promotes, the products of the other one keep the tensor cores busy. A warpgroup multiplies its rows
in *waves* of 64, so that all waves use the same accumulators.

With ``swap`` the kernel computes D^T = B @ A^T: the rows of B, the weights, fill WGMMA's side of 64
rows, and the few rows of A the narrow side. With ``is_split`` several thread blocks split the K of
a tile: each writes float32 sums to a workspace, and the last one to finish adds them up in order.

    barrier        who arrives (how many)                  who waits         for what
    full[stage]    producer (1) and TMA, bytes; cp.async   consumers         a k-block and its
                   of the producer's lanes (32)                              scales have arrived
    empty[stage]   consumer warps of all thread blocks     producer          the stage may be
                   of the cluster (4 or 8 in each)                           overwritten
    1 + group      a warpgroup (128 threads, named)        the same threads  partial sums or a part
                                                                             of D are written

Promotion, waves and tile shapes follow DeepGEMM's Hopper kernel, the ring follows CUTLASS's
persistent example.
"""

from math import gcd

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from kernelcat.kernels.cute.common.block_scales import (
    load_group_scales,
    load_row_scales,
    promote,
    read_scales,
)
from kernelcat.kernels.cute.common.mainloop import make_mma
from kernelcat.kernels.cute.common.ring import (
    SHARED_BYTES,
    load,
    make_ring,
    memory,
    operand,
    stage_layouts,
)
from kernelcat.kernels.cute.common.split_k import WARPGROUP, reduce_splits
from kernelcat.kernels.cute.common.tile_order import grouped_tile
from kernelcat.kernels.cute.common.tma import load_atom, store_atom
from kernelcat.kernels.cute.fp8_gemm.epilogue import store_tile

BLOCK = 128
"""Columns of a stage; rows and columns of B that share a scale."""

RESERVED_BYTES = 4096
"""Shared memory that is left to barriers and to the alignment of stages."""
MAX_STAGES = 12
GROUP_ROWS = 2048
"""Rows of a tile group, which is computed before the next column of tiles."""


class Wgmma:
    """Tiles of ``block_m`` x ``block_n`` of D = A @ B^T, or of D^T with ``swap``.

    N is a multiple of 8 and K of 16. Two warpgroups share a tile of 128 or more rows. D passes
    through shared memory: all of a warpgroup's tile with ``whole_tile``, else 64 rows of ``part_n``
    columns at a time, which leaves room for one more stage of operands.
    """

    def __init__(
        self,
        block_m: int,
        block_n: int,
        cluster: int,
        swap: bool,
        is_split: bool,
        whole_tile: bool,
    ):
        self.block_m, self.block_n = block_m, block_n
        self.swap, self.is_split = swap, is_split
        self.cluster = cluster
        # The thread blocks of a cluster share the longer side of their tiles: tiles that lie side
        # by side share their rows. Swapped tiles, one below the other, share the few rows of A.
        is_side_by_side = block_m >= block_n and not swap
        self.cluster_m = 1 if is_side_by_side else cluster
        self.cluster_n = cluster if is_side_by_side else 1
        self.group_m = max(1, GROUP_ROWS // (block_m * self.cluster_m))

        self.num_warpgroups = min(2, block_m // 64)
        self.num_waves = block_m // (64 * self.num_warpgroups)
        self.mma_threads = WARPGROUP * self.num_warpgroups
        # setmaxnreg works on whole warpgroups; one consumer warpgroup has registers enough.
        self.is_reallocated = self.num_warpgroups == 2
        self.threads = self.mma_threads + (WARPGROUP if self.is_reallocated else 32)
        self.producer_warp = self.mma_threads // 32

        # Scales of a stage: one for each row of A, one for each group of rows of B.
        self.rows_a, self.rows_b = (block_n, block_m) if swap else (block_m, block_n)
        self.group_rows = gcd(self.rows_b, BLOCK)
        self.num_groups = self.rows_b // self.group_rows

        self.layout = LayoutEnum.COL_MAJOR if swap else LayoutEnum.ROW_MAJOR
        self.part_n = min(block_n, 64 if block_n % 64 == 0 else 32)
        num_parts = self.num_waves * (block_n // self.part_n)
        self.d_stages = num_parts if whole_tile else 1
        d_bytes = 2 * 64 * self.part_n * self.d_stages * self.num_warpgroups
        stage_bytes = (block_m + block_n) * BLOCK + 4 * (self.rows_a + self.num_groups)
        free = SHARED_BYTES - RESERVED_BYTES - d_bytes
        self.num_stages = min(MAX_STAGES, free // stage_bytes)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        a_scale: cute.Pointer,  # (num_k_blocks, m)
        b: cute.Pointer,  # (n, k)
        b_scale: cute.Pointer,  # (num_n_blocks, num_k_blocks)
        d: cute.Pointer,  # (m, n)
        partial: cute.Pointer,  # (num_splits, tiles, block_m * block_n)
        counters: cute.Pointer,  # (tiles, warpgroups), zero before and after
        m: Int32,
        n: Int32,
        k: Int32,
        num_splits: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        n, k = cute.assume(n, divby=8), cute.assume(k, divby=16)
        num_k_blocks, num_n_blocks = cute.ceil_div(k, BLOCK), cute.ceil_div(n, BLOCK)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(n, 1)))
        # The first mode of scales is the one element that a cp.async copies.
        a_scales = cute.make_layout((1, m, num_k_blocks), stride=(1, 1, Int64(m)))
        mSA = cute.make_tensor(a_scale, a_scales)
        b_shape = (1, num_n_blocks, num_k_blocks)
        b_scales = cute.make_layout(b_shape, stride=(1, Int64(num_k_blocks), 1))
        mSB = cute.make_tensor(b_scale, b_scales)
        if cutlass.const_expr(self.swap):
            mA, mB = mB, mA
            mD = cute.make_tensor(d, cute.make_layout((n, m), stride=(1, n)))
        num_tiles_m = cute.ceil_div(mA.shape[0], self.block_m * self.cluster_m) * self.cluster_m
        num_tiles_n = cute.ceil_div(mB.shape[0], self.block_n * self.cluster_n) * self.cluster_n

        tiled_mma = make_mma(Float8E4M3FN, self.num_warpgroups, self.block_n)
        tile = (self.block_m, self.block_n, BLOCK)
        a_layout, b_layout = stage_layouts(tile, Float8E4M3FN, self.num_stages)
        d_tile = (64, self.part_n)
        d_layout = sm90.make_smem_layout_epi(
            BFloat16, self.layout, d_tile, self.d_stages * self.num_warpgroups
        )
        a_atom, tA = load_atom(mA, a_layout, (self.block_m, BLOCK), self.cluster_n)
        b_atom, tB = load_atom(mB, b_layout, (self.block_n, BLOCK), self.cluster_m)
        d_atom, tD = store_atom(mD, d_layout, d_tile)
        # Partial sums: vectors of four, those of a warpgroup's threads side by side.
        vectors = self.num_waves * self.block_n // 8
        slots = (4, vectors, WARPGROUP, self.num_warpgroups, num_tiles_m * num_tiles_n, num_splits)
        mP = cute.make_tensor(partial, cute.make_ordered_layout(slots, order=(0, 2, 1, 3, 4, 5)))
        mCount = cute.make_tensor(counters, cute.make_layout(slots[3:5]))

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            is_last: cute.struct.MemRange[Int32, self.num_warpgroups]
            a_scale: cute.struct.Align[
                cute.struct.MemRange[Float32, self.rows_a * self.num_stages], 16
            ]
            b_scale: cute.struct.MemRange[Float32, self.num_groups * self.num_stages]
            a: memory(Float8E4M3FN, a_layout)
            b: memory(Float8E4M3FN, b_layout)
            d: memory(BFloat16, d_layout)

        self.shared_storage = SharedStorage
        self.kernel(
            a_atom, tA, mSA, b_atom, tB, mSB, d_atom, tD, mP, mCount,
            tiled_mma, a_layout, b_layout, d_layout, num_tiles_m, num_tiles_n, num_splits,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,  # (m, k), coordinates for TMA; with swap (n, k)
        mSA: cute.Tensor,  # (1, m, num_k_blocks)
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,  # (n, k), coordinates for TMA; with swap (m, k)
        mSB: cute.Tensor,  # (1, num_n_blocks, num_k_blocks)
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,  # (m, n), coordinates for TMA; with swap (n, m)
        mP: cute.Tensor,  # (4, vectors, 128, warpgroups, tiles, num_splits)
        mCount: cute.Tensor,  # (warpgroups, tiles)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        d_layout: cute.ComposedLayout,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
        num_splits: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == self.producer_warp:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(d_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sSA = storage.a_scale.get_tensor(cute.make_layout((1, self.rows_a, self.num_stages)))
        sSB = storage.b_scale.get_tensor(cute.make_layout((1, self.num_groups, self.num_stages)))
        num_releases = self.cluster * 4 * self.num_warpgroups
        ring = make_ring(
            storage.barriers,
            self.num_stages,
            Float8E4M3FN,
            (a_layout, b_layout),
            num_releases,
            cluster=(self.cluster_m, self.cluster_n),
            num_producers=1 + 32,
        )

        num_k_blocks = cute.ceil_div(mA.shape[1], BLOCK)
        first = cute.arch.block_idx()[0] // self.cluster
        step = cute.arch.grid_dim()[0] // self.cluster
        items = first, num_tiles_m * num_tiles_n // self.cluster * num_splits, step
        if warp_idx >= self.producer_warp:
            if cutlass.const_expr(self.is_reallocated):
                cute.arch.setmaxregister_decrease(40)
            if warp_idx == self.producer_warp:
                self.produce(
                    a_atom, mA, mSA, b_atom, mB, mSB, sA, sSA, sB, sSB, ring,
                    num_tiles_m, num_tiles_n, num_splits, num_k_blocks, items, rank,
                )  # fmt: skip
        else:
            if cutlass.const_expr(self.is_reallocated):
                cute.arch.setmaxregister_increase(232)
            sD = storage.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
            self.consume(
                tiled_mma, sA, sSA, sB, sSB, sD, d_atom, mD, mP, mCount,
                storage.is_last.data_ptr(), ring, num_tiles_m, num_tiles_n, num_splits,
                num_k_blocks, items, rank, tidx,
            )  # fmt: skip

    @cute.jit
    def produce(
        self,
        a_atom: cute.CopyAtom,
        mA: cute.Tensor,  # coordinates for TMA, as in ``kernel``
        mSA: cute.Tensor,  # (1, m, num_k_blocks)
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,  # coordinates for TMA, as in ``kernel``
        mSB: cute.Tensor,  # (1, num_n_blocks, num_k_blocks)
        sA: cute.Tensor,  # (block_m, BLOCK, stages)
        sSA: cute.Tensor,  # (1, rows_a, stages)
        sB: cute.Tensor,  # (block_n, BLOCK, stages)
        sSB: cute.Tensor,  # (1, groups, stages)
        ring: pipeline.PipelineTmaAsync,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
        num_splits: Int32,
        num_k_blocks: Int32,
        items: tuple[Int32, Int32, Int32],  # the first one, the end, the step
        rank: Int32,
    ):
        """The producer warp: loads operands and scales of all work items of this thread block."""
        whole_cluster = (1 << self.cluster) - 1
        a_tile, b_tile = (self.block_m, BLOCK), (self.block_n, BLOCK)
        a = operand(a_atom, sA, mA, a_tile, self.cluster_n, rank, whole_cluster)
        b = operand(b_atom, sB, mB, b_tile, self.cluster_m, rank, whole_cluster)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        first, end, step = items
        for item in cutlass.range(first, end, step, unroll=1):
            m_idx, n_idx, split_idx = self.tile_of(item, num_tiles_m, num_tiles_n, rank)
            k_begin = split_idx * num_k_blocks // num_splits
            k_end = (split_idx + 1) * num_k_blocks // num_splits
            a_row = m_idx * self.block_m
            b_row = n_idx * self.block_n
            if cutlass.const_expr(self.swap):
                a_row, b_row = n_idx * self.block_n, m_idx * self.block_m
            for k_idx in cutlass.range(k_begin, k_end, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                load(a, m_idx, k_idx, state.index, barrier)
                load(b, n_idx, k_idx, state.index, barrier)
                load_row_scales(mSA[None, None, k_idx], sSA[None, None, state.index], a_row)
                load_group_scales(
                    mSB[None, None, k_idx], sSB[None, None, state.index], b_row, self.group_rows
                )
                cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                state.advance()
        # A thread block must not exit while the other one may still arrive at its barriers.
        ring.producer_tail(state)

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,  # (block_m, BLOCK, stages)
        sSA: cute.Tensor,  # (1, rows_a, stages)
        sB: cute.Tensor,  # (block_n, BLOCK, stages)
        sSB: cute.Tensor,  # (1, groups, stages)
        sD: cute.Tensor,  # (64, part_n, d_stages * warpgroups)
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,  # coordinates for TMA, as in ``kernel``
        mP: cute.Tensor,  # (4, vectors, 128, warpgroups, tiles, num_splits)
        mCount: cute.Tensor,  # (warpgroups, tiles)
        is_last: cute.Pointer,  # (warpgroups,) in shared memory
        ring: pipeline.PipelineTmaAsync,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
        num_splits: Int32,
        num_k_blocks: Int32,
        items: tuple[Int32, Int32, Int32],  # the first one, the end, the step
        rank: Int32,
        tidx: Int32,
    ):
        """The consumer warpgroups: multiply, promote, reduce splits, store."""
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thr_mma = tiled_mma.get_slice(
            cute.make_layout(self.num_warpgroups, stride=WARPGROUP)(group)
        )
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
        # Coordinates in the tile of a thread's sums of the first wave.
        cD = cute.make_identity_tensor((64 * self.num_warpgroups, self.block_n))
        tCcD = tiled_mma.get_slice(tidx).partition_C(cD)
        acc = cute.make_rmem_tensor(tCcD.shape, Float32)
        sums = cute.make_rmem_tensor((*tCcD.shape, self.num_waves), Float32)
        sD = cute.logical_divide(sD, (None, None, self.d_stages))[None, None, (None, group)]
        gD = cute.local_tile(mD, (64, self.part_n), (None, None))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        first, end, step = items
        for item in cutlass.range(first, end, step, unroll=1):
            m_idx, n_idx, split_idx = self.tile_of(item, num_tiles_m, num_tiles_n, rank)
            k_begin = split_idx * num_k_blocks // num_splits
            k_end = (split_idx + 1) * num_k_blocks // num_splits
            sums.fill(0.0)
            for _ in cutlass.range(k_begin, k_end, unroll=1):
                ring.consumer_wait(state)
                for wave in cutlass.range_constexpr(self.num_waves):
                    # Before the products: all reads are done when the stage is released.
                    rRows, rGroups = read_scales(
                        sSA[0, None, state.index], sSB[0, None, state.index], tCcD,
                        wave * self.mma_threads // 2, self.swap,
                    )  # fmt: skip
                    warpgroup.fence()
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        tiled_mma.set(warpgroup.Field.ACCUMULATE, block > 0)
                        rows = tCrA[None, wave, block, state.index]
                        rows = cute.make_tensor(rows.iterator, cute.append_ones(rows.layout, 2))
                        cols = tCrB[None, None, block, state.index]
                        cute.gemm(tiled_mma, acc, rows, cols, acc)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    if cutlass.const_expr(wave == self.num_waves - 1):
                        ring.consumer_release(state)
                    promote(acc, rRows, rGroups, sums[None, None, None, wave], self.swap)
                state.advance()
            complete = cutlass.Boolean(True)
            if cutlass.const_expr(self.is_split):
                tile = m_idx * num_tiles_n + n_idx
                complete = reduce_splits(
                    sums, mP[None, None, tidx % WARPGROUP, group, tile, None],
                    mCount.iterator + mCount.layout((group, tile)),
                    is_last + group, split_idx, group + 1,
                )  # fmt: skip
            if complete:
                row_idx = m_idx * (self.block_m // 64) + group
                store_tile(
                    sums, make_mma(Float8E4M3FN, 1, self.block_n), sD, gD, d_atom,
                    row_idx, self.num_warpgroups, n_idx, group + 1, self.swap,
                )  # fmt: skip
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def tile_of(self, item: Int32, num_tiles_m: Int32, num_tiles_n: Int32, rank: Int32):
        """Row and column, in tiles, and split of this thread block's part of work item ``item``."""
        clusters_m, clusters_n = num_tiles_m // self.cluster_m, num_tiles_n // self.cluster_n
        clusters = clusters_m * clusters_n
        row, col = grouped_tile(item % clusters, clusters_m, clusters_n, self.group_m)
        if cutlass.const_expr(self.cluster_m > 1):
            row = row * self.cluster_m + rank
        if cutlass.const_expr(self.cluster_n > 1):
            col = col * self.cluster_n + rank
        return row, col, item // clusters
