"""Scales of a k-block of 128 columns: of blocks of 4-bit weights (E8M0), of rows of A (float32)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float8E8M0FNU, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelcat.kernels.cute.common.scale_atoms import ATOM_COLUMNS, ATOM_ROWS, to_tensor_memory
from kernelcat.kernels.cute.common.tensor_memory import cta_group

BLOCK = 128
"""Columns of A that share a scale with a row; columns of a k-block."""
ONE = 0x7F7F7F7F
"""Four scales of 1 in E8M0."""
SCALE_BYTES = BLOCK // 32
"""Scales of a row of 4-bit weights in a k-block, a byte each."""
SLOTS = 4
"""K-blocks whose scales of A are in shared memory or on their way."""


def stored_words(w_scale: cute.Pointer, rows: Int64, k: Int32, is_whole: bool) -> cute.Tensor:
    """Scales of W (parts of a row's k-block, parts along K, rows).

    A row's scales of a k-block are 4 bytes. Where k is a multiple of 128 (``is_whole``) they are
    one word, else, with k a multiple of 64, two parts of 2 bytes.
    """
    part = Uint32 if is_whole else Uint16
    num_parts, row_parts = (1, k // BLOCK) if is_whole else (2, k // (BLOCK // 2))
    layout = cute.make_layout((num_parts, row_parts, rows), stride=(1, 1, Int64(row_parts)))
    return cute.make_tensor(cute.recast_ptr(w_scale, dtype=part), layout)


@cute.jit
def load_words(
    mScale: cute.Tensor,  # (parts, parts along K, rows)
    row: Int32,
    last: Int32,
    part: Int32,
    words: cute.Tensor,  # (ATOM_COLUMNS,), written
):
    """Reads this lane's scales: of rows ``row`` + lane, + 32 and so on, at most ``last``.

    ``part`` is the first one along K. Rows past the last one get its scales: their products are
    never stored.
    """
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(ATOM_COLUMNS):
        gScale = mScale[None, part, cutlass.min(row + i * 32 + lane, last)]
        words[i] = Uint32(gScale[0])
        if cutlass.const_expr(cute.size(gScale) == 2):
            words[i] = words[i] | (Uint32(gScale[1]) << 16)


def make_ring(barriers, num_stages):
    """Producer (the lanes of a warp) and consumer (the MMA warp) of stages of block scales."""
    return pipeline.PipelineAsyncUmma.create(
        num_stages=num_stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        barrier_storage=barriers.data_ptr(),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    ).make_participants()


class BlockScales(NamedTuple):
    """Block scales on their way to the tensor cores: stages of W's, and scales of 1 for A.

    In tensor memory W's scales of a k-block are in four columns, and those of A in the next four.
    A copy to tensor memory is the copy, its sources and its target.
    """

    words: cute.Tensor  # (ATOM_COLUMNS, lanes, stages): scales of four rows, 32 apart, in words
    ones: cute.Tensor  # (ATOM_ROWS,) words
    w: cute.Tensor  # in tensor memory
    a: cute.Tensor  # in tensor memory
    w_copy: tuple
    a_copy: tuple


def scale_layouts(tiled_mma, tiler, num_stages):
    """Layouts of W's scales in stages and in tensor memory, then of A's, which has one stage."""
    size, stage = BLOCK // SCALE_BYTES, (None, None, None, 0)
    w_layout = blockscaled.make_smem_layout_sfa(tiled_mma, tiler, size, num_stages)
    a_layout = blockscaled.make_smem_layout_sfb(tiled_mma, tiler, size, 1)
    w_stage, a_stage = cute.slice_(w_layout, stage), cute.slice_(a_layout, stage)
    return (
        w_layout,
        blockscaled.make_tmem_layout_sfa(tiled_mma, tiler, size, w_stage),
        a_layout,
        blockscaled.make_tmem_layout_sfb(tiled_mma, tiler, size, a_stage),
    )


def make_block_scales(tiled_mma, tiler, num_stages, shared, tmem_ptr) -> BlockScales:
    """Allocates both scales in shared memory, and in the columns of tensor memory from a place."""
    w_layout, tw_layout, a_layout, ta_layout = scale_layouts(tiled_mma, tiler, num_stages)
    sW = shared.allocate_tensor(Float8E8M0FNU, w_layout, 1024)
    sA = shared.allocate_tensor(Float8E8M0FNU, a_layout, 1024)
    tW = scales_at(tmem_ptr, tw_layout)
    tA = scales_at(tmem_ptr + ATOM_COLUMNS, ta_layout)
    w_words, a_words = (cute.recast_ptr(s.iterator, dtype=Uint32) for s in (sW, sA))
    return BlockScales(
        words=cute.make_tensor(w_words, cute.make_layout((ATOM_COLUMNS, 32, num_stages))),
        ones=cute.make_tensor(a_words, cute.make_layout(ATOM_ROWS)),
        w=tW,
        a=tA,
        w_copy=to_tensor_memory(cta_group(1), sW, tW),
        a_copy=to_tensor_memory(cta_group(1), sA, tA),
    )


def scales_at(tmem_ptr, layout) -> cute.Tensor:
    """Scales in tensor memory."""
    return cute.make_tensor(cute.recast_ptr(tmem_ptr, dtype=Float8E8M0FNU), layout)


def fill_with_ones(scales: BlockScales, thread: Int32):
    """Writes the scales of A; 128 threads call this, and a barrier of all threads follows."""
    scales.ones[thread] = Uint32(ONE)
    cute.arch.fence_proxy("async.shared", space="cta")


def copy_ones(scales: BlockScales):
    """Copies the scales of A to tensor memory."""
    copy, source, target = scales.a_copy
    cute.copy(copy, source[None, None, None, None, 0], target)


def copy_stage(scales: BlockScales, stage: Int32):
    """Copies a stage of W's scales to tensor memory."""
    copy, source, target = scales.w_copy
    cute.copy(copy, source[None, None, None, None, stage], target)


def beside(scales: BlockScales, w, a, block: int):
    """Operands of product ``block`` along K, each with its scales."""
    at = (None, None, block)
    return [w, scales.w[at]], [a, scales.a[at]]


class RowScales:
    """Scales of a tile's rows of A, which ``threads`` threads copy by cp.async.

    One thread copies the scales of one row, ``SLOTS`` - 1 k-blocks ahead. A barrier of the threads
    makes a slot visible.
    """

    def __init__(self, block_m: int, threads: int, barrier_id: int):
        self.block_m, self.threads, self.barrier_id = block_m, threads, barrier_id

    @cute.jit
    def begin(
        self,
        gScale: cute.Tensor,  # (1, k-blocks) of this thread's row
        sScale: cute.Tensor,  # (1, block_m, SLOTS)
        thread: Int32,
    ):
        """Starts to copy the scales of the first k-blocks."""
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.threads)
        for k_idx in cutlass.range_constexpr(SLOTS - 1):
            self.copy(gScale, sScale, Int32(k_idx), thread)

    @cute.jit
    def next(self, gScale: cute.Tensor, sScale: cute.Tensor, k_idx: Int32, thread: Int32):
        """Waits for the scales of a k-block, and starts to copy later ones.

        All threads have read the slot that is overwritten: it was that of the k-block before.
        """
        cute.arch.cp_async_wait_group(SLOTS - 2)
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.threads)
        self.copy(gScale, sScale, k_idx + (SLOTS - 1), thread)

    @cute.jit
    def copy(self, gScale: cute.Tensor, sScale: cute.Tensor, k_idx: Int32, thread: Int32):
        """One group of cp.async, empty past the last k-block."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        if (thread < self.block_m) & (k_idx < cute.size(gScale, mode=[1])):
            cute.copy(atom, gScale[None, k_idx], sScale[None, thread, k_idx % SLOTS])
        cute.arch.cp_async_commit_group()
