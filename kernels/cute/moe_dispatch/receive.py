"""Rows out of the slots into their places; the first thread blocks make the index maps."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelcat.kernels.cute.common.windows import (
    begin_epoch,
    end_epoch,
    slots_of,
    take_vectors,
    take_word,
    vectors_of_thread,
    wait_for_greeting,
)
from kernelcat.kernels.cute.moe_dispatch.arrive import LANES
from kernelcat.kernels.cute.moe_dispatch.maps import Maps, rows_before


class Receive:
    """A thread block for a token of each rank; a thread takes at most ``vectors`` of a row."""

    def __init__(self, ranks: int, top_k: int, threads: int, vectors: int, programmatic: bool):
        self.ranks, self.top_k, self.threads = ranks, top_k, threads
        self.vectors, self.programmatic = vectors, programmatic

    @cute.jit
    def __call__(
        self,
        rows: cute.Pointer,  # (ranks * tokens, hidden), as words
        scale: cute.Pointer,  # (num_scales, ranks * tokens), as words, or null
        gates: cute.Pointer,  # (ranks * tokens, top_k), as words
        row_of: cute.Pointer,  # (ranks, tokens) int32
        source_offsets: cute.Pointer,  # (ranks + 1,) int32
        offsets: cute.Pointer,  # (local_experts + 1,) int32
        order: cute.Pointer,  # (ranks * tokens * top_k,) int32
        position: cute.Pointer,  # (ranks * tokens * top_k,) int32
        ids: cute.Pointer,  # (ranks * tokens, top_k) int32
        numbers: cute.Pointer,  # (ranks * tokens,) int32
        counts: cute.Pointer,  # (ranks * chunks,) int32
        tokens: Int32,
        chunks: Int32,
        local_experts: Int32,
        data_vectors: Int32,
        num_scales: Int32,
        row_words: Int32,
        begin: Int32,
        count: Int32,
        map_ctas: Int32,
        num_ctas: Int32,
        rank: Int32,
        window0: Int64,
        window1: Int64,
        window2: Int64,
        window3: Int64,
        window4: Int64,
        window5: Int64,
        window6: Int64,
        window7: Int64,
        stream: cuda.CUstream,
    ):
        num_rows = self.ranks * tokens
        stride = cute.assume(4 * Int64(data_vectors), divby=4)
        vectors = cute.make_layout((4, data_vectors, num_rows), stride=(1, 4, stride))
        scales = cute.make_layout((num_scales, num_rows), stride=(Int64(num_rows), 1))
        pairs = cute.make_layout((self.top_k, num_rows), stride=(1, self.top_k))
        vector, flat = cute.make_layout(num_rows), cute.make_layout(num_rows * self.top_k)
        self.kernel(
            cute.make_tensor(rows, vectors),
            cute.make_tensor(scale, scales),
            cute.make_tensor(gates, pairs),
            cute.make_tensor(row_of, vector),
            cute.make_tensor(source_offsets, cute.make_layout(self.ranks + 1)),
            cute.make_tensor(offsets, cute.make_layout(local_experts + 1)),
            cute.make_tensor(order, flat),
            cute.make_tensor(position, flat),
            cute.make_tensor(ids, pairs),
            cute.make_tensor(numbers, vector),
            cute.make_tensor(counts, cute.make_layout(self.ranks * chunks)),
            tokens, chunks, local_experts, row_words, begin, count, map_ctas, rank, window0,
        ).launch(
            grid=(num_ctas, 1, 1), block=(self.threads, 1, 1), stream=stream,
            use_pdl=self.programmatic,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mRows: cute.Tensor,  # (4, data_vectors, ranks * tokens) words
        mScale: cute.Tensor,  # (num_scales, ranks * tokens) words
        mGates: cute.Tensor,  # (top_k, ranks * tokens) words
        mRowOf: cute.Tensor,  # (ranks * tokens,)
        mSources: cute.Tensor,  # (ranks + 1,)
        mOffsets: cute.Tensor,  # (local_experts + 1,)
        mOrder: cute.Tensor,  # (ranks * tokens * top_k,)
        mPosition: cute.Tensor,  # (ranks * tokens * top_k,)
        mAll: cute.Tensor,  # (top_k, ranks * tokens)
        mNumbers: cute.Tensor,  # (ranks * tokens,)
        mCounts: cute.Tensor,  # (ranks * chunks,)
        tokens: Int32,
        chunks: Int32,
        local_experts: Int32,
        row_words: Int32,
        begin: Int32,  # rows of tokens from here on
        count: Int32,
        map_ctas: Int32,
        rank: Int32,
        window0: Int64,
    ):
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        cta, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        epoch, tries = begin_epoch(window0, cta)
        if cta < map_ctas:
            Maps(self.ranks, self.top_k, self.threads).make(
                mAll, mNumbers, mCounts, mSources, mOffsets, mOrder, mPosition, tokens, chunks,
                local_experts, rank, map_ctas,
            )  # fmt: skip
        else:
            for index in cutlass.range(cta - map_ctas, count, num_ctas - map_ctas, unroll=1):
                token = begin + index
                for shift in cutlass.range_constexpr(self.ranks):
                    source = (rank + shift) % self.ranks
                    before = rows_before(mCounts, source * chunks + token // LANES)
                    number = mNumbers[source * tokens + token]
                    row = before + number
                    if number < 0:
                        row = Int32(-1)
                    if cute.arch.thread_idx()[0] == 0:
                        mRowOf[source * tokens + token] = row
                    if row >= 0:
                        place = 4 * Int64(source * count + index) * row_words
                        slot = slots_of(window0, epoch) + place
                        tries = self.take_row(
                            mRows[None, None, row], mScale[None, row], mGates[None, row], slot,
                            window0, source, tries,
                        )  # fmt: skip
        if count > 0:
            if cta == num_ctas - 1 and cute.arch.thread_idx()[0] == 0:
                for shift in cutlass.range_constexpr(1, self.ranks):
                    wait_for_greeting(window0, epoch, (rank + shift) % self.ranks, tries)
            end_epoch(window0, epoch, self.threads)

    @cute.jit
    def take_row(
        self,
        row: cute.Tensor,  # (4, data_vectors) words
        scales: cute.Tensor,  # (num_scales,)
        gates: cute.Tensor,  # (top_k,)
        slot: Int64,
        window: Int64,
        source: Int32,
        tries: Int32,
    ):
        """Takes a row out of a slot; returns what is left of ``tries``."""
        tidx, data_vectors, num_scales = cute.arch.thread_idx()[0], row.shape[1], scales.shape[0]
        words = cute.make_rmem_tensor((4, self.vectors), Uint32)
        tries = take_vectors(
            window, source, slot + 16 * tidx, 16 * self.threads,
            vectors_of_thread(data_vectors, self.threads), words, tries,
        )  # fmt: skip
        for i in cutlass.range_constexpr(self.vectors):
            at = tidx + i * self.threads
            if at < data_vectors:
                cute.autovec_copy(words[None, i], row[None, at])
        tail = slot + 16 * data_vectors
        for i in cutlass.range(tidx, num_scales + self.top_k, self.threads, unroll=1):
            word, tries = take_word(window, source, tail + 4 * i, tries)
            if i < num_scales:
                scales[i] = word
            else:
                gates[i - num_scales] = word
        return tries
