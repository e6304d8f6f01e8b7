"""Rows of A, grouped by expert, times their expert's weights on Hopper's tensor cores: persistent.

A producer warpgroup keeps a ring of stages full: weights come by TMA, rows of A by TMA or,
gathered, by cp.async, scales of float8 by cp.async. One or two consumer warpgroups, each with its
part of a tile's rows, run WGMMA on the stages and store what they have. By programmatic dependent
launch the kernel sets up while the kernel before it ends.

    barrier          who arrives (how many)                    who waits         for what
    full[stage]      a producer warp (1) with TMA's bytes, and consumers         a k-block has
                     all threads that copy by cp.async (128)                     arrived
    empty[stage]     consumer warps (4 or 8)                   producer warps    the stage may be
                                                                                 overwritten
    bias[consumer]   a warpgroup (128 threads, named)          the same threads  the tile's bias

Grouped products over ragged segments whose tiles every thread block finds from the segments'
offsets are those of MegaBlocks (Gale et al. 2022) and CUTLASS's grouped GEMM; products of float8
are promoted to float32 sums as in DeepGEMM.
"""

from dataclasses import dataclass
from math import gcd

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.block_scales import promote, read_scales
from kernelcat.kernels.cute.common.mainloop import drain, make_mma, multiply
from kernelcat.kernels.cute.common.ring import load, make_ring, memory, operand, stage_layouts
from kernelcat.kernels.cute.common.tma import load_atom
from kernelcat.kernels.cute.moe_gemm.copies import GatheredRows, Scales
from kernelcat.kernels.cute.moe_gemm.expert_tiles import ExpertTiles
from kernelcat.kernels.cute.moe_gemm.result import Result

ROW_BYTES = 128
"""Bytes of a row of a stage: the widest row that the hardware swizzles."""
WARPGROUP = 128
SCALED = 128
"""Columns, and rows of weights, that share a scale of float8."""
BIAS_BARRIER = 1
"""The first of the named barriers ``bias``."""


@dataclass(frozen=True)
class FencedRing:
    """A ring whose consumers also see what cp.async wrote, which WGMMA reads by another proxy."""

    ring: pipeline.PipelineTmaAsync

    def consumer_wait(self, state: pipeline.PipelineState):
        self.ring.consumer_wait(state)
        cute.arch.fence_proxy("async.shared", space="cta")

    def consumer_release(self, state: pipeline.PipelineState):
        self.ring.consumer_release(state)


class Wgmma:
    """Tiles of ``block_m`` rows of an expert x ``block_n`` rows of its weights.

    Its last rows and columns may lie outside the expert; they are computed, but not stored. With
    ``gather`` the rows of A are tokens. With ``is_partial`` the kernel stores float32 rows, which
    `Combine` adds up. K is a multiple of 16 bytes.
    """

    def __init__(
        self,
        dtype: str,
        act_dtype: str,
        block_m: int,
        block_n: int,
        num_stages: int,
        max_experts: int,
        ctas_per_sm: int,
        activation: str,
        gather: bool,
        bias: bool,
        is_partial: bool,
        is_aligned: bool,
    ):
        self.dtype = element_type(act_dtype)  # of both operands
        self.is_scaled, self.gather = act_dtype != dtype, gather
        self.is_copied = gather or self.is_scaled  # whether a whole warpgroup copies
        self.block_m, self.block_n, self.num_stages = block_m, block_n, num_stages
        self.block_k = ROW_BYTES * 8 // self.dtype.width
        self.max_experts, self.ctas_per_sm = max_experts, ctas_per_sm
        self.num_consumers = 2 if block_m > 64 else 1
        self.rows = block_m // self.num_consumers  # of a consumer
        self.threads = WARPGROUP * (self.num_consumers + 1)
        # One consumer has registers enough.
        self.is_reallocated = self.num_consumers == 2
        self.producer_registers, self.mma_registers = (72, 216) if gather else (40, 232)
        self.tiles = ExpertTiles(block_m, block_n)
        self.group_rows = gcd(block_n, SCALED)
        self.num_groups = block_n // self.group_rows
        self.gathered = GatheredRows(self.dtype, block_m, num_stages)
        self.scales = Scales(block_m, self.group_rows, gather)
        self.result = Result(element_type(dtype), block_n, activation, bias, is_partial, is_aligned)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (a_rows, k)
        a_scale: cute.Pointer,  # (k / 128, a_rows), for float8
        w: cute.Pointer,  # (experts, n, k)
        w_scale: cute.Pointer,  # (experts, n / 128, k / 128), for float8
        bias: cute.Pointer,  # (experts, n)
        offsets: cute.Pointer,  # (experts + 1,)
        order: cute.Pointer,  # (rows,)
        out: cute.Pointer,  # (rows, pitch): D, or partial rows
        rows: Int32,
        a_rows: Int32,
        top_k: Int32,
        experts: Int32,
        n: Int32,
        k: Int32,
        pitch: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        k = cute.assume(k, divby=16 * 8 // self.dtype.width)
        blocks_n, blocks_k = cute.ceil_div(n, SCALED), cute.ceil_div(k, SCALED)
        mA = cute.make_tensor(a, cute.make_layout((a_rows, k), stride=(k, 1)))
        mW = cute.make_tensor(w, cute.make_layout((experts * n, k), stride=(k, 1)))
        # The first mode of scales is the one element that a cp.async copies.
        a_scales = cute.make_layout((1, a_rows, blocks_k), stride=(1, 1, Int64(a_rows)))
        w_scales = cute.make_layout(
            (1, blocks_n, blocks_k, experts), stride=(1, blocks_k, 1, Int64(blocks_n) * blocks_k)
        )
        tiled_mma = make_mma(self.dtype, 1, self.block_n)
        tile = (self.block_m, self.block_n, self.block_k)
        a_layout, w_layout = stage_layouts(tile, self.dtype, self.num_stages)
        w_atom, tW = load_atom(mW, w_layout, (self.block_n, self.block_k))
        if cutlass.const_expr(self.gather):
            a_atom = None
            tA = cute.make_tensor(a, self.gathered.layout(a_rows, k))
        else:
            a_atom, tA = load_atom(mA, a_layout, (self.block_m, self.block_k))

        scaled_stages = self.num_stages if self.is_scaled else 0
        bias_columns = self.block_n if self.result.bias else 0

        @cute.struct
        class SharedStorage:
            barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            offsets: cute.struct.MemRange[Int32, self.max_experts + 1]
            blocks: cute.struct.MemRange[Int32, self.max_experts + 1]
            bias: cute.struct.Align[
                cute.struct.MemRange[Float32, bias_columns * self.num_consumers], 16
            ]
            a_scale: cute.struct.MemRange[Float32, self.block_m * scaled_stages]
            w_scale: cute.struct.MemRange[Float32, self.num_groups * scaled_stages]
            a: memory(self.dtype, a_layout)
            w: memory(self.dtype, w_layout)

        self.shared_storage = SharedStorage
        self.kernel(
            a_atom,
            tA,
            cute.make_tensor(a_scale, a_scales),
            w_atom,
            tW,
            cute.make_tensor(w_scale, w_scales),
            cute.make_tensor(bias, cute.make_layout((n, experts), stride=(1, Int64(n)))),
            cute.make_tensor(offsets, cute.make_layout(experts + 1)),
            cute.make_tensor(order, cute.make_layout(rows)),
            cute.make_tensor(out, self.result.layout(rows, pitch)),
            tiled_mma, a_layout, w_layout, top_k, n, cute.ceil_div(k, self.block_k),
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; else the DSL reads a limit from the driver
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom | None,
        mA: cute.Tensor,  # (rows, k), coordinates for TMA; (vector, vectors, tokens) to gather from
        mSA: cute.Tensor,  # (1, rows of A, k / 128)
        w_atom: cute.CopyAtom,
        mW: cute.Tensor,  # (experts * n, k), coordinates for TMA
        mSW: cute.Tensor,  # (1, n / 128, k / 128, experts)
        mBias: cute.Tensor,  # (n, experts)
        mOffsets: cute.Tensor,  # (experts + 1,)
        mOrder: cute.Tensor,  # (rows,)
        mOut: cute.Tensor,  # (vector, vectors, rows)
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        top_k: Int32,
        n: Int32,
        num_k_blocks: Int32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = 4 * self.num_consumers
        if warp_idx == producer_warp:
            cpasync.prefetch_descriptor(w_atom)
            if cutlass.const_expr(not self.gather):
                cpasync.prefetch_descriptor(a_atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sW = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        scales = cute.make_layout((1, self.block_m, self.num_stages))
        sSA = cute.make_tensor(storage.a_scale.data_ptr(), scales)
        scales = cute.make_layout((1, self.num_groups, self.num_stages))
        sSW = cute.make_tensor(storage.w_scale.data_ptr(), scales)
        lists = cute.make_layout(self.max_experts + 1)
        sOffsets, sBlocks = storage.offsets.get_tensor(lists), storage.blocks.get_tensor(lists)
        bias = cute.make_layout((2, self.block_n // 2, self.num_consumers))
        sBias = cute.make_tensor(storage.bias.data_ptr(), bias)
        ring = make_ring(
            storage.barriers,
            self.num_stages,
            self.dtype,
            (w_layout,) if self.gather else (a_layout, w_layout),
            4 * self.num_consumers,
            num_producers=1 + (WARPGROUP if self.is_copied else 0),
        )
        # The kernel before may still be writing everything but the weights.
        cute.arch.griddepcontrol_wait()
        self.tiles.load(mOffsets, sOffsets, sBlocks, self.threads)
        experts, num_n = cute.size(mOffsets) - 1, cute.ceil_div(n, self.block_n)
        lists = (sOffsets, sBlocks, experts, num_n)
        if warp_idx >= producer_warp:
            if cutlass.const_expr(self.is_reallocated):
                cute.arch.setmaxregister_decrease(self.producer_registers)
            if self.is_copied or warp_idx == producer_warp:
                sVectors = self.gathered.shared_vectors(storage.a.data_ptr())
                self.produce(
                    a_atom, mA, mSA, w_atom, mW, mSW, mOrder, sA, sVectors, sSA, sW, sSW, ring,
                    lists, top_k, n, num_k_blocks, warp_idx == producer_warp,
                )  # fmt: skip
            cute.arch.griddepcontrol_launch_dependents()
        else:
            if cutlass.const_expr(self.is_reallocated):
                cute.arch.setmaxregister_increase(self.mma_registers)
            if cutlass.const_expr(not self.result.is_partial):
                self.result.clear(mOut, sOffsets[experts], WARPGROUP * self.num_consumers)
            self.consume(
                tiled_mma, sA, sSA, sW, sSW, sBias, mBias, mOut, ring, lists, num_k_blocks
            )

    # ---- producer ------------------------------------------------------------------------------

    @cute.jit
    def produce(
        self,
        a_atom: cute.CopyAtom | None,
        mA: cute.Tensor,  # as in ``kernel``
        mSA: cute.Tensor,  # (1, rows of A, k / 128)
        w_atom: cute.CopyAtom,
        mW: cute.Tensor,  # (experts * n, k), coordinates for TMA
        mSW: cute.Tensor,  # (1, n / 128, k / 128, experts)
        mOrder: cute.Tensor,  # (rows,)
        sA: cute.Tensor,  # (block_m, block_k, stages)
        sVectors: cute.Tensor,  # (vector, ROW_VECTORS, block_m, stages): sA for cp.async
        sSA: cute.Tensor,  # (1, block_m, stages)
        sW: cute.Tensor,  # (block_n, block_k, stages)
        sSW: cute.Tensor,  # (1, groups, stages)
        ring: pipeline.PipelineTmaAsync,
        lists: tuple[cute.Tensor, cute.Tensor, Int32, Int32],  # see ``ExpertTiles.find``
        top_k: Int32,
        n: Int32,
        num_k_blocks: Int32,
        is_leader: cutlass.Boolean,
    ):
        """Loads the k-blocks of all tiles of this thread block.

        Runs in all warps of the warpgroup where they copy, else in the leader, which issues TMA.
        """
        _, sBlocks, experts, num_n = lists
        rows = cute.make_rmem_tensor(self.gathered.num_passes, Int32)
        scaled_rows = cute.make_rmem_tensor(self.scales.count, Int32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        expert = Int32(0)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for index in cutlass.range(first, sBlocks[experts] * num_n, step, unroll=1):
            expert, row, num_rows, col = self.tiles.find(index, expert, *lists)
            gW = cute.domain_offset((expert * n + col, 0), mW)
            w = operand(w_atom, sW, gW, (self.block_n, self.block_k))
            if cutlass.const_expr(self.gather):
                self.gathered.find(rows, mOrder, top_k, row, num_rows)
            else:
                gA = cute.domain_offset((row, 0), mA)
                a = operand(a_atom, sA, gA, (self.block_m, self.block_k))
            if cutlass.const_expr(self.is_scaled):
                self.scales.find(scaled_rows, mOrder, top_k, row, num_rows)
            for k_idx in cutlass.range(num_k_blocks, unroll=1):
                barrier = ring.producer_get_barrier(state)
                if is_leader:
                    ring.producer_acquire(state)
                    load(w, 0, k_idx, state.index, barrier)
                    if cutlass.const_expr(not self.gather):
                        load(a, 0, k_idx, state.index, barrier)
                else:
                    ring.sync_object_empty.wait(state.index, state.phase)
                if cutlass.const_expr(self.gather):
                    stage = sVectors[None, None, None, state.index]
                    self.gathered.copy(mA, rows, num_rows, k_idx, stage)
                if cutlass.const_expr(self.is_scaled):
                    self.scales.copy(
                        mSA[None, None, k_idx], mSW[None, None, k_idx, expert], scaled_rows, col,
                        sSA[None, None, state.index], sSW[None, None, state.index],
                    )  # fmt: skip
                if cutlass.const_expr(self.is_copied):
                    cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                state.advance()

    # ---- consumers -----------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,  # (block_m, block_k, stages)
        sSA: cute.Tensor,  # (1, block_m, stages)
        sW: cute.Tensor,  # (block_n, block_k, stages)
        sSW: cute.Tensor,  # (1, groups, stages)
        sBias: cute.Tensor,  # (2, block_n / 2, consumers)
        mBias: cute.Tensor,  # (n, experts)
        mOut: cute.Tensor,  # (vector, vectors, rows)
        ring: pipeline.PipelineTmaAsync,
        lists: tuple[cute.Tensor, cute.Tensor, Int32, Int32],  # see ``ExpertTiles.find``
        num_k_blocks: Int32,
    ):
        """Multiplies and stores this warpgroup's rows of all tiles of the thread block."""
        _, sBlocks, experts, num_n = lists
        if cutlass.const_expr(self.gather):
            ring = FencedRing(ring)
        consumer = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        first_row = consumer * self.rows
        thr_mma = tiled_mma.get_slice(0)
        sA = cute.local_tile(sA, (self.rows, self.block_k, self.num_stages), (consumer, 0, 0))
        sSA = cute.local_tile(sSA, (1, self.rows, self.num_stages), (0, consumer, 0))
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tCrW = tiled_mma.make_fragment_B(thr_mma.partition_B(sW))
        sums = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((self.rows, self.block_n)), Float32
        )
        bias = cute.make_rmem_tensor(self.result.bias_count, Float32)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        expert = Int32(0)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for index in cutlass.range(first, sBlocks[experts] * num_n, step, unroll=1):
            expert, row, num_rows, col = self.tiles.find(index, expert, *lists)
            if first_row < num_rows:
                self.result.load_bias(mBias, expert, col, bias)
                sums.fill(0.0)
                if cutlass.const_expr(self.is_scaled):
                    read = self.multiply_scaled(
                        tiled_mma, sums, tCrA, tCrW, sSA, sSW, ring, read, num_k_blocks
                    )
                else:
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                    read, release = multiply(
                        tiled_mma, sums, tCrA, tCrW, ring, read, release, 0, num_k_blocks
                    )
                    release = drain(ring, release)
                gBias = sBias[None, None, consumer]
                self.result.share_bias(bias, gBias, BIAS_BARRIER + consumer)
                for i in cutlass.range_constexpr(self.rows // 64):
                    self.result.store(
                        sums[None, i, 0], gBias, mOut, first_row + i * 64, row, num_rows, col
                    )
            else:  # this warpgroup has no rows of the tile
                for _ in cutlass.range(num_k_blocks, unroll=1):
                    ring.consumer_wait(read)
                    ring.consumer_release(read)
                    read.advance()
                    release.advance()

    @cute.jit
    def multiply_scaled(
        self,
        tiled_mma: cute.TiledMma,
        sums: cute.Tensor,  # ((2, 2, block_n / 8), rows / 64, 1)
        tCrA: cute.Tensor,  # (MMA, MMA_M, MMA_K, stages)
        tCrW: cute.Tensor,  # (MMA, MMA_N, MMA_K, stages)
        sSA: cute.Tensor,  # (1, rows, stages)
        sSW: cute.Tensor,  # (1, groups, stages)
        ring: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState,
        num_k_blocks: Int32,
    ):
        """Adds products of float8, promoted after each k-block, i.e. after 128 columns."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        # Coordinates in 64 rows of the tile of a thread's sums.
        cD = cute.make_identity_tensor((64, self.block_n))
        tCcD = tiled_mma.get_slice(thread).partition_C(cD)
        acc = cute.make_rmem_tensor(tCcD.shape, Float32)
        for _ in cutlass.range(num_k_blocks, unroll=1):
            ring.consumer_wait(state)
            for wave in cutlass.range_constexpr(self.rows // 64):
                # Before the products: all reads are done when the stage is released.
                rRows, rGroups = read_scales(
                    sSA[0, None, state.index], sSW[0, None, state.index], tCcD, wave * 64, False
                )
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, block > 0)
                    rows = tCrA[None, wave, block, state.index]
                    rows = cute.make_tensor(rows.iterator, cute.append_ones(rows.layout, 2))
                    cute.gemm(tiled_mma, acc, rows, tCrW[None, None, block, state.index], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if cutlass.const_expr(wave == self.rows // 64 - 1):
                    ring.consumer_release(state)
                wave_sums = sums[None, wave, None]
                wave_sums = cute.make_tensor(wave_sums.iterator, acc.layout)
                promote(acc, rRows, rGroups, wave_sums, False)
            state.advance()
        return state
