"""GEMM on Hopper's tensor cores: persistent, warp-specialized, TMA in and out.

One producer warp keeps a ring of stages full by TMA; two warpgroups run WGMMA on the stages. Either
both compute one tile, half of its rows each (*cooperative*), or each computes a tile of its own and
one stores while the other multiplies (*pingpong*). The two thread blocks of a cluster multicast the
operand that both need: B where their tiles lie one below the other, A where they lie side by side.
TMA loads zeros where a tile reaches outside its matrix and stores nothing there, so ragged sizes
need no code. By programmatic dependent launch a kernel sets up while the kernel before it ends.

    barrier       who arrives (how many)                    who waits         for what
    full[stage]   producer (1) and TMA, bytes               consumers         a k-block has arrived
    empty[stage]  warps that read the stage, in all thread  producer          the stage may be
                  blocks of the cluster (4 or 8 in each)                      overwritten
    part[group]   a warpgroup (128 threads, named)          the same threads  D's part is written,
                                                                              the next buffer free
    turn[group]   both warpgroups (256 threads, named)      a warpgroup       its turn to multiply

The schedules are those of CUTLASS's Hopper kernels, the tile shapes those of QuACK's GEMM.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from kernelcat.kernels.cute.common.epilogue import Epilogue
from kernelcat.kernels.cute.common.mainloop import drain, make_mma, multiply
from kernelcat.kernels.cute.common.ring import (
    SHARED_BYTES,
    load,
    make_ring,
    memory,
    operand,
    stage_layouts,
)
from kernelcat.kernels.cute.common.tile_order import grouped_tile
from kernelcat.kernels.cute.common.tma import load_atom
from kernelcat.kernels.cute.gemm.store import FIRST_BARRIER, WarpgroupStore

BLOCK_K = 64
MAX_STAGES = 8
GROUP_ROWS = 2048
"""Rows of D that are computed before the next column of tiles."""
WARPGROUPS = 2
MMA_THREADS = 128 * WARPGROUPS
THREADS = MMA_THREADS + 128
PRODUCER_WARP = MMA_THREADS // 32
TURN_BARRIER = FIRST_BARRIER + WARPGROUPS
"""The first of the named barriers ``turn``."""


class Wgmma:
    """Tiles of ``block_m`` x ``block_n`` of Z = A @ B^T, and the ``Epilogue`` that makes them D.

    A cluster has one thread block, or two: ``cluster_m`` = 2 one below the other or ``cluster_n``
    = 2 side by side.
    """

    def __init__(
        self,
        block_m: int,
        block_n: int,
        cluster_m: int,
        cluster_n: int,
        is_pingpong: bool,
        **epilogue: str | bool,
    ):
        self.epilogue = Epilogue(**epilogue)
        self.dtype = self.epilogue.dtype
        self.block_m, self.block_n = block_m, block_n
        self.cluster_m, self.cluster_n = cluster_m, cluster_n
        self.cluster = cluster_m * cluster_n
        self.is_pingpong = is_pingpong
        self.rows = block_m if is_pingpong else block_m // WARPGROUPS  # of a warpgroup
        self.group_m = GROUP_ROWS // (block_m * cluster_m)
        needs_most = self.rows * block_n >= 128 * 208
        self.producer_registers, self.mma_registers = (24, 240) if needs_most else (40, 232)
        self.out = WarpgroupStore(self.epilogue, self.rows, block_n)
        stage_bytes = 2 * (block_m + block_n) * BLOCK_K
        free = SHARED_BYTES - 2048
        self.num_stages = min(MAX_STAGES, (free - WARPGROUPS * self.out.min_bytes) // stage_bytes)
        self.out.use((free - self.num_stages * stage_bytes) // WARPGROUPS)

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
        n, k = cute.assume(n, divby=8), cute.assume(k, divby=8)
        num_cols = cute.assume(n // self.epilogue.span, divby=8)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(k, 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(k, 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, num_cols), stride=(num_cols, 1)))
        mBias = cute.make_tensor(bias, cute.make_layout((2, n // 2), stride=(1, 2)))
        stride = cute.assume(Int64(num_cols), divby=8)
        pairs = cute.make_layout((2, num_cols // 2, m), stride=(1, 2, stride))
        mR = cute.make_tensor(residual, pairs)

        tiled_mma = make_mma(self.dtype, 1, self.block_n)
        tile = (self.block_m, self.block_n, BLOCK_K)
        a_layout, b_layout = stage_layouts(tile, self.dtype, self.num_stages)
        d_layout = self.out.shared_layout(WARPGROUPS)
        a_atom, tA = load_atom(mA, a_layout, (self.block_m, BLOCK_K), self.cluster_n)
        b_atom, tB = load_atom(mB, b_layout, (self.block_n, BLOCK_K), self.cluster_m)
        d_atom, tD = self.out.tma_atom(mD, d_layout)

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.num_stages]
            a: memory(self.dtype, a_layout)
            b: memory(self.dtype, b_layout)
            d: memory(self.dtype, d_layout)

        self.shared_storage = SharedStorage
        num_tiles_m = cute.ceil_div(m, self.block_m * self.cluster_m)
        num_tiles_n = cute.ceil_div(n, self.block_n * self.cluster_n)
        self.kernel(
            a_atom, tA, b_atom, tB, d_atom, tD, mBias, mR,
            tiled_mma, a_layout, b_layout, d_layout, num_tiles_m, num_tiles_n,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
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
        mD: cute.Tensor,  # (m, columns of D), coordinates for TMA
        mBias: cute.Tensor,  # (2, n / 2)
        mR: cute.Tensor,  # (2, columns of D / 2, m)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        d_layout: cute.ComposedLayout,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == PRODUCER_WARP:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(d_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sD = storage.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
        # Each warp that reads a stage releases it in every thread block of the cluster.
        reading_warps = 4 * (1 if self.is_pingpong else WARPGROUPS)
        ring = make_ring(
            storage.barriers,
            self.num_stages,
            self.dtype,
            (a_layout, b_layout),
            self.cluster * reading_warps,
            cluster=(self.cluster_m, self.cluster_n),
        )
        # The kernel before may still be writing A and B; the kernel after may begin.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp_idx >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == PRODUCER_WARP:
                self.produce(a_atom, mA, b_atom, mB, sA, sB, ring, num_tiles_m, num_tiles_n)
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            num_k_blocks = cute.ceil_div(mA.shape[1], BLOCK_K)
            self.consume(
                tiled_mma, sA, sB, sD, d_atom, mD, mBias, mR, ring,
                num_tiles_m, num_tiles_n, num_k_blocks,
            )  # fmt: skip

    @cute.jit
    def tile_of(self, index: Int32, num_tiles_m: Int32, num_tiles_n: Int32):
        """Row and column, in tiles, of this thread block's tile in the cluster's tile ``index``."""
        row, col = grouped_tile(index, num_tiles_m, num_tiles_n, self.group_m)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if cutlass.const_expr(self.cluster_m > 1):
            row = row * self.cluster_m + rank
        if cutlass.const_expr(self.cluster_n > 1):
            col = col * self.cluster_n + rank
        return row, col

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
        num_tiles_m: Int32,
        num_tiles_n: Int32,
    ):
        """The producer warp: loads the k-blocks of all tiles of this thread block."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        whole_cluster = (1 << self.cluster) - 1
        a_tile, b_tile = (self.block_m, BLOCK_K), (self.block_n, BLOCK_K)
        a = operand(a_atom, sA, mA, a_tile, self.cluster_n, rank, whole_cluster)
        b = operand(b_atom, sB, mB, b_tile, self.cluster_m, rank, whole_cluster)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        first = cute.arch.block_idx()[0] // self.cluster
        step = cute.arch.grid_dim()[0] // self.cluster
        for index in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
            row, col = self.tile_of(index, num_tiles_m, num_tiles_n)
            for k_idx in cutlass.range(cute.size(a.tiles, mode=[2]), unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                load(a, row, k_idx, state.index, barrier)
                load(b, col, k_idx, state.index, barrier)
                state.advance()
        # A thread block must not exit while the other one may still arrive at its barriers.
        ring.producer_tail(state)

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,  # (block_m, BLOCK_K, stages)
        sB: cute.Tensor,  # (block_n, BLOCK_K, stages)
        sD: cute.Tensor,  # (64, part_n, stages of both warpgroups)
        d_atom: cute.CopyAtom,
        mD: cute.Tensor,  # (m, columns of D), coordinates for TMA
        mBias: cute.Tensor,  # (2, n / 2)
        mR: cute.Tensor,  # (2, columns of D / 2, m)
        ring: pipeline.PipelineTmaAsync,
        num_tiles_m: Int32,
        num_tiles_n: Int32,
        num_k_blocks: Int32,
    ):
        """The consumer warpgroups: multiply and store; in pingpong order every other tile each."""
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        thr_mma = tiled_mma.get_slice(0)
        first_row = 0 if cutlass.const_expr(self.is_pingpong) else group
        sA = cute.local_tile(sA, (self.rows, BLOCK_K, self.num_stages), (first_row, 0, 0))
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
        acc_shape = tiled_mma.partition_shape_C((self.rows, self.block_n))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        first = cute.arch.block_idx()[0] // self.cluster
        step = cute.arch.grid_dim()[0] // self.cluster
        if cutlass.const_expr(self.is_pingpong):
            first, step = first + group * step, WARPGROUPS * step
            if group == 1:
                read.advance(num_k_blocks)
                release.advance(num_k_blocks)
                self.pass_turn(0)

        for index in cutlass.range(first, num_tiles_m * num_tiles_n, step, unroll=1):
            row, col = self.tile_of(index, num_tiles_m, num_tiles_n)
            acc.fill(0.0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            if cutlass.const_expr(self.is_pingpong):
                self.wait_turn(group)
            read, release = multiply(
                tiled_mma, acc, tCrA, tCrB, ring, read, release, 0, num_k_blocks
            )
            if cutlass.const_expr(self.is_pingpong):
                self.pass_turn(1 - group)
            release = drain(ring, release)
            if cutlass.const_expr(self.is_pingpong):  # skip the other warpgroup's tile
                read.advance(num_k_blocks)
                release.advance(num_k_blocks)
            row = row * self.block_m
            if cutlass.const_expr(not self.is_pingpong):
                row += group * self.rows
            self.out.store(acc, tiled_mma, sD, d_atom, mD, mBias, mR, row, col, group)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def wait_turn(self, group: Int32):
        """Wait until the other warpgroup passes the turn to multiply."""
        cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=MMA_THREADS)

    @cute.jit
    def pass_turn(self, group: Int32):
        """Let ``group``, the other warpgroup, multiply."""
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + group, number_of_threads=MMA_THREADS)
