"""Block-scaled FP8 GEMM on Hopper's tensor cores: persistent, warp-specialized, TMA in and out.

One producer warp keeps a ring of shared-memory stages full: operands by TMA, their scales, which
need no alignment, by cp.async; both complete the stage's barrier. Warpgroups run WGMMA over a stage
of 128 columns, the depth that has one scale, and add the product, scaled, to float32 registers.
While one warpgroup promotes, the other one's products keep the tensor cores busy. A warpgroup goes
over its rows in *waves* of 64, so that the accumulators of one wave serve them all.

``swap`` computes D^T = B @ A^T: the weights' rows then fill WGMMA's 64-row side and the few rows of
A its narrow side. ``split`` cuts K among CTAs: each leaves its float32 sums in a workspace, and the
last one to finish a tile adds them up in order.

Promotion, waves and the tile shapes follow DeepGEMM's Hopper kernel; the ring follows CUTLASS's
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

from kernelcat.kernels.cute.common.mainloop import make_mma
from kernelcat.kernels.cute.common.ring import load, make_ring, memory, operand, stage_layouts
from kernelcat.kernels.cute.common.split_k import reduce_splits
from kernelcat.kernels.cute.common.tile_order import grouped
from kernelcat.kernels.cute.common.tma import load_atom, store_atom
from kernelcat.kernels.cute.fp8_gemm.epilogue import store_tile
from kernelcat.kernels.cute.fp8_gemm.scales import (
    load_group_scales,
    load_row_scales,
    promote,
    read_scales,
)

BLOCK = 128
"""Columns of a stage; rows and columns of B that share a scale."""

SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 4096
MAX_STAGES = 12
WARPGROUP = 128


class Wgmma:
    """D = A @ B^T in tiles of ``block_m`` x ``block_n`` of D (of D^T where ``swap``).

    N is a multiple of 8 and K of 16. Two warpgroups share a tile of 128 or more rows. The epilogue
    stages a warpgroup's tile in shared memory, ``whole_tile`` or 64 rows of ``epi_n`` columns at a
    time; the latter leaves room for one more stage of operands.
    """

    def __init__(
        self,
        block_m: int,
        block_n: int,
        cluster: int,
        swap: bool,
        split: bool,
        whole_tile: bool,
    ):
        self.block_m, self.block_n = block_m, block_n
        self.swap, self.split = swap, split
        self.cluster = cluster
        # A cluster's CTAs lie side by side and share the M side where that is the longer one,
        # else below each other; swapped tiles share the few rows of A.
        side_by_side = block_m >= block_n and not swap
        self.cluster_m = 1 if side_by_side else cluster
        self.cluster_n = cluster if side_by_side else 1
        self.group_m = max(1, 2048 // (block_m * self.cluster_m))

        self.warpgroups = min(2, block_m // 64)
        self.waves = block_m // (64 * self.warpgroups)
        self.mma_threads = WARPGROUP * self.warpgroups
        # setmaxnreg works on whole warpgroups; alone, one warpgroup needs no more registers.
        self.reallocate = self.warpgroups == 2
        self.threads = self.mma_threads + (WARPGROUP if self.reallocate else 32)
        self.producer_warp = self.mma_threads // 32

        # Scales a stage: one for each row of A, one for each group of rows of B.
        self.rows_a, self.rows_b = (block_n, block_m) if swap else (block_m, block_n)
        self.group_rows = gcd(self.rows_b, BLOCK)
        self.groups = self.rows_b // self.group_rows

        self.layout = LayoutEnum.COL_MAJOR if swap else LayoutEnum.ROW_MAJOR
        self.epi_n = min(block_n, 64 if block_n % 64 == 0 else 32)
        self.epi_parts = self.waves * (block_n // self.epi_n)
        self.epi_stages = self.epi_parts if whole_tile else 1
        epi_bytes = 2 * 64 * self.epi_n * self.epi_stages * self.warpgroups
        stage_bytes = (block_m + block_n) * BLOCK + 4 * (self.rows_a + self.groups)
        room = SHARED_BYTES - RESERVED_BYTES - epi_bytes
        self.stages = min(MAX_STAGES, room // stage_bytes)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        a_scale: cute.Pointer,  # (k_blocks, m)
        b: cute.Pointer,  # (n, k)
        b_scale: cute.Pointer,  # (n_blocks, k_blocks)
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
        k_blocks, n_blocks = cute.ceil_div(k, BLOCK), cute.ceil_div(n, BLOCK)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(n, 1)))
        # Scales get a mode of one element: what cp.async copies.
        mSA = cute.make_tensor(a_scale, cute.make_layout((1, m, k_blocks), stride=(1, 1, Int64(m))))
        mSB = cute.make_tensor(
            b_scale, cute.make_layout((1, n_blocks, k_blocks), stride=(1, Int64(k_blocks), 1))
        )
        if cutlass.const_expr(self.swap):
            mA, mB = mB, mA
            mD = cute.make_tensor(d, cute.make_layout((n, m), stride=(1, n)))
        tiles_m = cute.ceil_div(mA.shape[0], self.block_m * self.cluster_m) * self.cluster_m
        tiles_n = cute.ceil_div(mB.shape[0], self.block_n * self.cluster_n) * self.cluster_n

        tiled_mma = make_mma(Float8E4M3FN, self.warpgroups, self.block_n)
        tile = (self.block_m, self.block_n, BLOCK)
        a_layout, b_layout = stage_layouts(tile, Float8E4M3FN, self.stages)
        epi_tile = (64, self.epi_n)
        d_layout = sm90.make_smem_layout_epi(
            BFloat16, self.layout, epi_tile, self.epi_stages * self.warpgroups
        )
        a_atom, tA = load_atom(mA, a_layout, (self.block_m, BLOCK), self.cluster_n)
        b_atom, tB = load_atom(mB, b_layout, (self.block_n, BLOCK), self.cluster_m)
        d_atom, tD = store_atom(mD, d_layout, epi_tile)
        # A thread keeps its sums in vectors of four, a warpgroup's threads side by side.
        vectors = self.waves * self.block_n // 8
        slots = (4, vectors, WARPGROUP, self.warpgroups, tiles_m * tiles_n, num_splits)
        mP = cute.make_tensor(partial, cute.make_ordered_layout(slots, order=(0, 2, 1, 3, 4, 5)))
        mCount = cute.make_tensor(counters, cute.make_layout((self.warpgroups, tiles_m * tiles_n)))

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            is_last: cute.struct.MemRange[Int32, self.warpgroups]
            a_scale: cute.struct.Align[cute.struct.MemRange[Float32, self.rows_a * self.stages], 16]
            b_scale: cute.struct.MemRange[Float32, self.groups * self.stages]
            a: memory(Float8E4M3FN, a_layout)
            b: memory(Float8E4M3FN, b_layout)
            d: memory(BFloat16, d_layout)

        self.shared_storage = SharedStorage
        self.kernel(
            a_atom, tA, mSA, b_atom, tB, mSB, d_atom, tD, mP, mCount,
            tiled_mma, a_layout, b_layout, d_layout, tiles_m, tiles_n, num_splits,
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
        mA: cute.Tensor,
        mSA: cute.Tensor,
        b_atom: cute.CopyAtom,
        mB: cute.Tensor,
        mSB: cute.Tensor,
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,
        mP: cute.Tensor,
        mCount: cute.Tensor,
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        d_layout: cute.ComposedLayout,
        tiles_m: Int32,
        tiles_n: Int32,
        num_splits: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp_idx == self.producer_warp:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(d_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sSA = storage.a_scale.get_tensor(cute.make_layout((1, self.rows_a, self.stages)))
        sSB = storage.b_scale.get_tensor(cute.make_layout((1, self.groups, self.stages)))
        # A stage is full when TMA's bytes and the cp.async of all 32 lanes have landed, and
        # empty when each warp of either CTA that reads a multicast stage has let go of it.
        releases = self.cluster * 4 * self.warpgroups
        ring = make_ring(
            storage.barriers,
            self.stages,
            Float8E4M3FN,
            (a_layout, b_layout),
            releases,
            cluster=(self.cluster_m, self.cluster_n),
            producers=1 + 32,
        )

        k_blocks = cute.ceil_div(mA.shape[1], BLOCK)
        cluster_idx = cute.arch.block_idx()[0] // self.cluster
        num_clusters = cute.arch.grid_dim()[0] // self.cluster
        num_works = tiles_m * tiles_n // self.cluster * num_splits

        if warp_idx >= self.producer_warp:
            if cutlass.const_expr(self.reallocate):
                cute.arch.setmaxregister_decrease(40)
            if warp_idx == self.producer_warp:
                everyone = (1 << self.cluster) - 1
                a_tile, b_tile = (self.block_m, BLOCK), (self.block_n, BLOCK)
                a = operand(a_atom, sA, mA, a_tile, self.cluster_n, cta_rank, everyone)
                b = operand(b_atom, sB, mB, b_tile, self.cluster_m, cta_rank, everyone)
                state = pipeline.make_pipeline_state(
                    pipeline.PipelineUserType.Producer, self.stages
                )
                for work in cutlass.range(cluster_idx, num_works, num_clusters, unroll=1):
                    m_idx, n_idx, split_idx = self.tile_of(work, tiles_m, tiles_n, cta_rank)
                    k_begin = split_idx * k_blocks // num_splits
                    k_end = (split_idx + 1) * k_blocks // num_splits
                    a_first = m_idx * self.block_m
                    b_first = n_idx * self.block_n
                    if cutlass.const_expr(self.swap):
                        a_first, b_first = n_idx * self.block_n, m_idx * self.block_m
                    for k_idx in cutlass.range(k_begin, k_end, unroll=1):
                        ring.producer_acquire(state)
                        barrier = ring.producer_get_barrier(state)
                        load(a, m_idx, k_idx, state.index, barrier)
                        load(b, n_idx, k_idx, state.index, barrier)
                        load_row_scales(
                            mSA[None, None, k_idx], sSA[None, None, state.index], a_first
                        )
                        load_group_scales(
                            mSB[None, None, k_idx],
                            sSB[None, None, state.index],
                            b_first,
                            self.group_rows,
                        )
                        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                        state.advance()
                # A CTA must not exit while its peer may still signal its barriers.
                ring.producer_tail(state)
        else:
            if cutlass.const_expr(self.reallocate):
                cute.arch.setmaxregister_increase(232)
            wg_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP)
            thr_mma = tiled_mma.get_slice(
                cute.make_layout(self.warpgroups, stride=WARPGROUP)(wg_idx)
            )
            tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
            tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
            # Where a thread's sums of the first wave lie in the tile.
            cD = cute.make_identity_tensor((64 * self.warpgroups, self.block_n))
            tCcD = tiled_mma.get_slice(tidx).partition_C(cD)
            acc = cute.make_rmem_tensor(tCcD.shape, Float32)
            total = cute.make_rmem_tensor((*tCcD.shape, self.waves), Float32)
            sD = storage.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
            sD = cute.logical_divide(sD, (None, None, self.epi_stages))[None, None, (None, wg_idx)]
            gD = cute.local_tile(mD, (64, self.epi_n), (None, None))
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            for work in cutlass.range(cluster_idx, num_works, num_clusters, unroll=1):
                m_idx, n_idx, split_idx = self.tile_of(work, tiles_m, tiles_n, cta_rank)
                k_begin = split_idx * k_blocks // num_splits
                k_end = (split_idx + 1) * k_blocks // num_splits
                total.fill(0.0)
                for _ in cutlass.range(k_begin, k_end, unroll=1):
                    ring.consumer_wait(state)
                    for wave in cutlass.range_constexpr(self.waves):
                        # Ahead of the products: no read is in flight when the stage is let go.
                        rRows, rGroups = read_scales(
                            sSA[0, None, state.index],
                            sSB[0, None, state.index],
                            tCcD,
                            wave * self.mma_threads // 2,
                            self.swap,
                        )
                        warpgroup.fence()
                        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                            tiled_mma.set(warpgroup.Field.ACCUMULATE, block > 0)
                            rows = tCrA[None, wave, block, state.index]
                            rows = cute.make_tensor(rows.iterator, cute.append_ones(rows.layout, 2))
                            cols = tCrB[None, None, block, state.index]
                            cute.gemm(tiled_mma, acc, rows, cols, acc)
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                        if cutlass.const_expr(wave == self.waves - 1):
                            ring.consumer_release(state)
                        promote(acc, rRows, rGroups, total[None, None, None, wave], self.swap)
                    state.advance()
                complete = cutlass.Boolean(True)
                if cutlass.const_expr(self.split):
                    tile = m_idx * tiles_n + n_idx
                    complete = reduce_splits(
                        total,
                        mP[None, None, tidx % WARPGROUP, wg_idx, tile, None],
                        mCount.iterator + mCount.layout((wg_idx, tile)),
                        storage.is_last.data_ptr() + wg_idx,
                        split_idx,
                        wg_idx + 1,
                    )
                if complete:
                    store_tile(
                        total,
                        make_mma(Float8E4M3FN, 1, self.block_n),
                        sD,
                        gD,
                        d_atom,
                        m_idx * (self.block_m // 64) + wg_idx,
                        self.warpgroups,
                        n_idx,
                        wg_idx + 1,
                        self.swap,
                    )
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def tile_of(self, work: Int32, tiles_m: Int32, tiles_n: Int32, cta_rank: Int32):
        """Row tile, column tile and split of a CTA's work item."""
        clusters_m, clusters_n = tiles_m // self.cluster_m, tiles_n // self.cluster_n
        clusters = clusters_m * clusters_n
        row, col = grouped(work % clusters, clusters_m, clusters_n, self.group_m)
        if cutlass.const_expr(self.cluster_m > 1):
            row = row * self.cluster_m + cta_rank
        if cutlass.const_expr(self.cluster_n > 1):
            col = col * self.cluster_n + cta_rank
        return row, col, work // clusters
