"""Every rank sends its rows into slots of all peers' windows, and sums up what arrives; a thread
block has whole rows, so that it may normalize the sums."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.pairs import halves, joined
from kernelcat.kernels.cute.common.windows import (
    begin_epoch,
    end_epoch,
    load_vectors,
    send_vectors,
    slots_of,
    take_vectors,
    vectors_of_thread,
)


class Slots:
    """The sum of rows over ``ranks`` windows; a thread has at most ``vectors`` vectors of a row.

    ``residual`` and ``norm`` say whether rows are added first, and normalized afterwards.
    """

    def __init__(
        self, dtype: str, ranks: int, threads: int, vectors: int, residual: bool, norm: bool,
        programmatic: bool,
    ):  # fmt: skip
        self.dtype, self.ranks, self.threads, self.vectors = (
            element_type(dtype), ranks, threads, vectors,
        )  # fmt: skip
        self.has_residual, self.has_norm, self.programmatic = residual, norm, programmatic

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (tokens, hidden), as words
        residual: cute.Pointer,  # (tokens, hidden), or null
        weight: cute.Pointer,  # (hidden,), or null
        out: cute.Pointer,  # (tokens, hidden)
        normed: cute.Pointer,  # (tokens, hidden), or null
        tokens: Int32,
        hidden: Int32,
        begin: Int32,
        count: Int32,
        eps: Float32,
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
        rows = cute.make_layout(
            (4, vectors, tokens), stride=(1, 4, cute.assume(4 * Int64(vectors), divby=4))
        )
        mX, mR, mO, mN = [cute.make_tensor(each, rows) for each in (x, residual, out, normed)]
        mW = cute.make_tensor(weight, cute.make_layout((4, vectors), stride=(1, 4)))
        self.kernel(
            mX, mR, mW, mO, mN, hidden, begin, count, eps, rank,
            (window0, window1, window2, window3, window4, window5, window6, window7),
        ).launch(
            grid=(num_ctas, 1, 1), block=(self.threads, 1, 1), stream=stream,
            use_pdl=self.programmatic,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (4, vectors, tokens) words
        mR: cute.Tensor,
        mW: cute.Tensor,  # (4, vectors)
        mO: cute.Tensor,
        mN: cute.Tensor,
        hidden: Int32,
        begin: Int32,  # tokens from here on
        count: Int32,
        eps: Float32,
        rank: Int32,
        windows: tuple,  # addresses, from this rank's window on
    ):
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.threads // 32), 16)
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        step = cute.arch.grid_dim()[0]
        num_vectors = mX.shape[1]
        epoch, tries = begin_epoch(windows[0], cta)
        row_bytes, num_mine = 16 * Int64(num_vectors), vectors_of_thread(num_vectors, self.threads)
        own = cute.make_rmem_tensor((4, self.vectors), Uint32)
        for token in cutlass.range(cta, count, step, unroll=1):
            load_vectors(mX[None, None, begin + token], own, self.threads)
            place = Int64(rank * count + token) * row_bytes + 16 * tidx
            for shift in cutlass.range_constexpr(1, self.ranks):
                slot = slots_of(windows[shift], epoch) + place
                send_vectors(slot, 16 * self.threads, num_mine, own)
        for token in cutlass.range(cta, count, step, unroll=1):
            sums = cute.make_rmem_tensor((8, self.vectors), Float32)
            part = cute.make_rmem_tensor((4, self.vectors), Uint32)
            load_vectors(mX[None, None, begin + token], own, self.threads)
            if cutlass.const_expr(self.has_residual):
                load_vectors(mR[None, None, begin + token], part, self.threads)
                self.add(sums, part, True)
            for source in cutlass.range_constexpr(self.ranks):
                if source == rank:
                    cute.autovec_copy(own, part)
                else:
                    place = Int64(source * count + token) * row_bytes + 16 * tidx
                    tries = take_vectors(
                        windows[0], Int32(source), slots_of(windows[0], epoch) + place,
                        16 * self.threads, num_mine, part, tries,
                    )  # fmt: skip
                self.add(sums, part, source == 0 and not self.has_residual)
            squares = self.store_sums(sums, part, mO[None, None, begin + token], num_mine)
            if cutlass.const_expr(self.has_norm):
                mean = self.cta_sum(squares, sSums) / Float32(hidden)
                factor = cute.math.rsqrt(mean + eps)
                self.normalize(part, factor, mW, mN[None, None, begin + token], num_mine)
        end_epoch(windows[0], epoch, self.threads)

    @cute.jit
    def add(
        self,
        sums: cute.Tensor,  # (8, vectors) float32
        part: cute.Tensor,  # (4, vectors) words
        is_first: cutlass.Constexpr,
    ):
        """Adds a part to the sums, or begins with it."""
        for i in cutlass.range_constexpr(self.vectors):
            for w in cutlass.range_constexpr(4):
                low, high = halves(part[w, i], self.dtype)
                if cutlass.const_expr(is_first):
                    sums[2 * w, i], sums[2 * w + 1, i] = low, high
                else:
                    sums[2 * w, i] = sums[2 * w, i] + low
                    sums[2 * w + 1, i] = sums[2 * w + 1, i] + high

    @cute.jit
    def store_sums(
        self,
        sums: cute.Tensor,  # (8, vectors) float32
        rounded: cute.Tensor,  # (4, vectors) words, written
        out: cute.Tensor,  # (4, num_vectors)
        count: Int32,
    ):
        """Rounds and stores a row; returns the sum of this thread's squares."""
        squares = Float32(0)
        for i in cutlass.range_constexpr(self.vectors):
            if i < count:
                for w in cutlass.range_constexpr(4):
                    rounded[w, i] = joined(sums[2 * w, i], sums[2 * w + 1, i], self.dtype)
                    low, high = halves(rounded[w, i], self.dtype)
                    squares += low * low + high * high
                at = cute.arch.thread_idx()[0] + i * self.threads
                cute.autovec_copy(rounded[None, i], out[None, at])
        return squares

    @cute.jit
    def cta_sum(
        self,
        value: Float32,
        sSums: cute.Tensor,  # (threads / 32,), in shared memory
    ):
        """The sum over the thread block, in every thread."""
        tidx = cute.arch.thread_idx()[0]
        value = cute.arch.warp_reduction_sum(value)
        cute.arch.barrier()  # the threads have read what stood there before
        if tidx % 32 == 0:
            sSums[tidx // 32] = value
        cute.arch.barrier()
        total = Float32(0)
        for warp in cutlass.range_constexpr(self.threads // 32):
            total += sSums[warp]
        return total

    @cute.jit
    def normalize(
        self,
        row: cute.Tensor,  # (4, vectors) words
        factor: Float32,
        mW: cute.Tensor,  # (4, num_vectors)
        normed: cute.Tensor,  # (4, num_vectors), written
        count: Int32,
    ):
        """Stores a row times ``factor`` and the weight."""
        weights = cute.make_rmem_tensor((4, self.vectors), Uint32)
        load_vectors(mW, weights, self.threads)
        for i in cutlass.range_constexpr(self.vectors):
            if i < count:
                for w in cutlass.range_constexpr(4):
                    low, high = halves(row[w, i], self.dtype)
                    low_weight, high_weight = halves(weights[w, i], self.dtype)
                    row[w, i] = joined(
                        low * factor * low_weight, high * factor * high_weight, self.dtype
                    )
                at = cute.arch.thread_idx()[0] + i * self.threads
                cute.autovec_copy(row[None, i], normed[None, at])
