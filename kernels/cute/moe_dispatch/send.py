"""Expert ids to all ranks, and rows into slots in the windows of the ranks of their experts.

The first flagged word greets a rank: with no row for it, a rank still says that it has begun. Ids
follow it.

A row on the wire is a vector of 16 bytes for each 8 elements, or 16 in float8, then words: the
scales of float8 and the weights of the token's experts.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.bits import bits_of
from kernelcat.kernels.cute.common.pairs import halves
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse
from kernelcat.kernels.cute.common.windows import (
    begin_epoch,
    flagged_words_of,
    load_vectors,
    on_wire,
    send_vectors,
    slots_of,
    store_flagged,
    store_word,
    vectors_of_thread,
)

SCALE_LANES = 8
"""Lanes side by side on the 128 elements of a scale."""


class Send:
    """A thread block for each token; a thread has at most ``vectors`` vectors of a row."""

    def __init__(
        self, dtype: str, float8: bool, ranks: int, top_k: int, threads: int, vectors: int,
        programmatic: bool,
    ):  # fmt: skip
        self.dtype, self.is_float8, self.ranks = element_type(dtype), float8, ranks
        self.top_k, self.threads, self.vectors = top_k, threads, vectors
        self.programmatic, self.parts = programmatic, 2 if float8 else 1

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (tokens, hidden), as words
        expert_ids: cute.Pointer,  # (tokens, top_k) int32
        weights: cute.Pointer,  # (tokens, top_k) float32
        tokens: Int32,
        hidden: Int32,
        local_experts: Int32,
        row_words: Int32,
        begin: Int32,
        count: Int32,
        num_ids: Int32,
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
        vectors = hidden // 8
        stride = cute.assume(4 * Int64(vectors), divby=4)
        mX = cute.make_tensor(x, cute.make_layout((4, vectors, tokens), stride=(1, 4, stride)))
        pairs = cute.make_layout((self.top_k, tokens), stride=(1, self.top_k))
        mI, mG = cute.make_tensor(expert_ids, pairs), cute.make_tensor(weights, pairs)
        self.kernel(
            mX, mI, mG, local_experts, row_words, begin, count, num_ids, rank,
            (window0, window1, window2, window3, window4, window5, window6, window7),
        ).launch(
            grid=(num_ctas, 1, 1), block=(self.threads, 1, 1), stream=stream,
            use_pdl=self.programmatic,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (4, hidden / 8, tokens) words
        mI: cute.Tensor,  # (top_k, tokens)
        mG: cute.Tensor,  # (top_k, tokens)
        local_experts: Int32,
        row_words: Int32,
        begin: Int32,  # rows of tokens from here on
        count: Int32,
        num_ids: Int32,  # to send, of all tokens
        rank: Int32,
        windows: tuple,  # addresses, from this rank's window on
    ):
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        num_ctas = cute.arch.grid_dim()[0]
        epoch, _ = begin_epoch(windows[0], cta)
        num_mine = vectors_of_thread(mX.shape[1] // self.parts, self.threads)
        first, step = cta * self.threads + tidx, num_ctas * self.threads
        if first == 0:
            for shift in cutlass.range_constexpr(1, self.ranks):
                store_flagged(flagged_words_of(windows[shift], epoch, rank), Uint32(0), epoch)
        for i in cutlass.range(first, num_ids, step, unroll=1):
            expert = Uint32(mI[i % self.top_k, i // self.top_k])
            for shift in cutlass.range_constexpr(1, self.ranks + 1):
                words = flagged_words_of(windows[shift % self.ranks], epoch, rank)
                store_flagged(words + 8 * (1 + Int64(i)), expert, epoch)
        loaded = cute.make_rmem_tensor((4, self.parts * self.vectors), Uint32)
        sent = cute.make_rmem_tensor((4, self.vectors), Uint32)
        for index in cutlass.range(cta, count, num_ctas, unroll=1):
            token = begin + index
            serving = self.serving_ranks(mI, token, local_experts)
            place = 4 * Int64(rank * count + index) * row_words
            tail = place + 16 * (mX.shape[1] // self.parts)
            if cutlass.const_expr(self.is_float8):
                self.load_pairs(mX[None, None, token], loaded)
                for i in cutlass.range_constexpr(self.vectors):
                    scale = self.quantize(loaded, sent, i)
                    if tidx % SCALE_LANES == 0 and i < num_mine:
                        word = tail + 4 * ((tidx + i * self.threads) // SCALE_LANES)
                        self.send_word(windows, epoch, word, bits_of(scale), serving, rank)
                tail += 4 * cute.ceil_div(mX.shape[1] * 8, BLOCK)
            else:
                load_vectors(mX[None, None, token], sent, self.threads)
            for shift in cutlass.range_constexpr(1, self.ranks + 1):
                if serving >> ((rank + shift) % self.ranks) & 1 == 1:
                    slot = slots_of(windows[shift % self.ranks], epoch) + place
                    send_vectors(slot + 16 * tidx, 16 * self.threads, num_mine, sent)
            if tidx < self.top_k:
                weight = bits_of(mG[tidx, token])
                self.send_word(windows, epoch, tail + 4 * tidx, weight, serving, rank)

    @cute.jit
    def serving_ranks(self, mI: cute.Tensor, token: Int32, local_experts: Int32):
        """A bit for each rank that holds an expert of a token."""
        serving = Int32(0)
        for k in cutlass.range_constexpr(self.top_k):
            expert = mI[k, token]
            if expert >= 0:
                serving = serving | (Int32(1) << (expert // local_experts))
        return serving

    @cute.jit
    def send_word(
        self, windows: cutlass.Constexpr, epoch: Uint32, place: Int64, word: Uint32,
        serving: Int32, rank: Int32,
    ):  # fmt: skip
        """Sends a word to ``place`` in the slots of all ranks that serve its token."""
        for shift in cutlass.range_constexpr(1, self.ranks + 1):
            if serving >> ((rank + shift) % self.ranks) & 1 == 1:
                store_word(slots_of(windows[shift % self.ranks], epoch) + place, on_wire(word))

    @cute.jit
    def load_pairs(
        self,
        row: cute.Tensor,  # (4, hidden / 8), in global memory
        loaded: cute.Tensor,  # (4, 2 * vectors), written; zeros after the row
    ):
        """Loads the elements of a thread's vectors in float8: two vectors of x for each."""
        loaded.fill(0)
        for i in cutlass.range_constexpr(2 * self.vectors):
            at = 2 * (cute.arch.thread_idx()[0] + i // 2 * self.threads) + i % 2
            if at < row.shape[1]:
                cute.autovec_copy(row[None, at], loaded[None, i])

    @cute.jit
    def quantize(
        self,
        loaded: cute.Tensor,  # (4, 2 * vectors) words of x
        sent: cute.Tensor,  # (4, vectors) words, of which vector i is written
        i: cutlass.Constexpr,
    ):
        """Quantizes vector i; returns the scale of the 128 elements of eight lanes."""
        values = cute.make_rmem_tensor((4, 4), Float32)
        amax = Float32(0)
        for w in cutlass.range_constexpr(8):
            low, high = halves(loaded[w % 4, 2 * i + w // 4], self.dtype)
            values[2 * (w % 2), w // 2], values[2 * (w % 2) + 1, w // 2] = low, high
            amax = largest(largest(amax, low), high)
        amax = cute.arch.warp_reduction_max(amax, threads_in_group=SCALE_LANES)
        scale, inverse = scale_and_inverse(amax)
        for w in cutlass.range_constexpr(4):
            for v in cutlass.range_constexpr(4):
                values[v, w] = values[v, w] * inverse
            sent[w, i] = e4m3x4(values[None, w])
        return scale
