"""Adding up what warps and CTAs found for the same rows: maxima, sums and values.

Each leaves its values as they are, with the maximum they are relative to; who reads them weighs
them. Of the CTAs, the last to arrive reads what all left, in the same order on every run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.kernels.cute.common.online_softmax import LOWEST, exp2, finish

VECTOR = 4
"""Floats in 16 bytes."""
PADDING = 8
"""Floats between rows, so that a warp writes to 32 different banks."""


class Merge:
    """Sums of ``block_m`` rows, of which ``parts`` warps and several CTAs have parts of the keys.

    A row is its values and one vector more: the maximum, the sum, and nothing.
    """

    def __init__(self, dtype, head_dim, block_m, row_halves, parts, threads, sinks, scales):
        self.dtype, self.head_dim, self.block_m, self.parts = dtype, head_dim, block_m, parts
        self.row_halves = row_halves
        self.sinks, self.tensor_scales = sinks, scales == "tensor"
        self.vectors, self.threads = head_dim // VECTOR, threads
        self.shared_bytes = 4 * (head_dim + PADDING) * block_m * parts

    def shared_layout(self):
        """(VECTOR, vectors + 1, block_m, parts)."""
        pitch = self.head_dim + PADDING
        return cute.make_layout(
            (VECTOR, self.vectors + 1, self.block_m, self.parts),
            stride=(1, VECTOR, pitch, pitch * self.block_m),
        )

    def partial_layout(self, tiles, num_splits):
        """(VECTOR, vectors + 1, block_m, num_splits, tiles)."""
        pitch = self.head_dim + VECTOR
        split = pitch * self.block_m
        return cute.make_layout(
            (VECTOR, self.vectors + 1, self.block_m, num_splits, tiles),
            stride=(1, VECTOR, pitch, split, cute.assume(Int64(num_splits) * split, divby=VECTOR)),
        )

    @cute.jit
    def leave(
        self,
        out: cute.Tensor,  # ((2, 2), MMA_M, MMA_N), this thread's values
        tCcO: cute.Tensor,  # as out: rows and columns
        value_column: cutlass.Constexpr,  # of the product -> of the head
        most: cute.Tensor,  # (rows of a thread,)
        total: cute.Tensor,  # as most, this thread's share
        sO: cute.Tensor,  # (VECTOR, vectors + 1, block_m) of a warp
    ):
        """A warp's rows into shared memory."""
        for i in cutlass.range_constexpr(cute.size(out, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                row = tCcO[(0, half), i, 0][0]
                sO[0, self.vectors, row] = most[2 * i + half]
                sO[1, self.vectors, row] = cute.arch.warp_reduction_sum(
                    total[2 * i + half], threads_in_group=4
                )
                for j in cutlass.range_constexpr(cute.size(out, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        col = value_column(tCcO[(c, 0), 0, j][1])
                        sO[col % VECTOR, col // VECTOR, row] = out[(c, half), i, j]

    @cute.jit
    def gather(
        self,
        vectors: cute.Tensor,  # (VECTOR, num_parts): of a row's values
        sums: cute.Tensor,  # (VECTOR, num_parts): the row's maximum and sum
        num_parts: Int32,
        values: cute.Tensor,  # (VECTOR,), written
        unroll: cutlass.Constexpr[int] = 4,
    ):
        """A vector of a row's values, relative to the maximum; the maximum, and the sum."""
        most, total = Float32(LOWEST), Float32(0)
        for part in cutlass.range(num_parts, unroll=unroll):
            most = cute.arch.fmax(most, sums[0, part])
        values.fill(0.0)
        held = cute.make_rmem_tensor(VECTOR, Float32)
        for part in cutlass.range(num_parts, unroll=unroll):
            weight = exp2(sums[0, part] - most)
            total += weight * sums[1, part]
            cute.autovec_copy(vectors[None, part], held)
            for v in cutlass.range_constexpr(VECTOR):
                values[v] += weight * held[v]
        return most, total

    @cute.jit
    def store(
        self,
        parts: cute.Tensor,  # (VECTOR, vectors + 1, block_m, num_parts)
        num_parts: Int32,
        num_rows: Int32,
        mO: cute.Tensor,  # (head_dim, group, query tokens) that share the key-value head
        mL: cute.Tensor,  # (group, query tokens)
        mSinks: cute.Tensor,  # (group,)
        group: Int32,
        row_begin: Int32,
        v_factor: Float32,
    ):
        """Rows of out and lse."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        first = cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_rows * self.vectors, self.threads, unroll=1):
            row, vector = index // self.vectors, index % self.vectors
            most, total = self.gather(
                parts[None, vector, row, None], parts[None, self.vectors, row, None],
                num_parts, values,
            )  # fmt: skip
            self.store_vector(
                values, most, total, row_begin + row, vector, mO, mL, mSinks, group, v_factor
            )

    @cute.jit
    def store_vector(
        self,
        values: cute.Tensor,  # (VECTOR,), relative to the maximum
        most: Float32,
        total: Float32,
        row: Int32,
        vector: Int32,
        mO: cute.Tensor,  # (head_dim, group, query tokens)
        mL: cute.Tensor,  # (group, query tokens)
        mSinks: cute.Tensor,  # (group,)
        group: Int32,
        v_factor: Float32,
    ):
        """A vector of a row of out, and with the first of them the row's lse."""
        head, token = row % group, row // group
        sink = Float32(0)
        if cutlass.const_expr(self.sinks):
            sink = mSinks[head]
        factor, lse = finish(most, total, sink, self.sinks)
        if cutlass.const_expr(self.tensor_scales):
            factor *= v_factor
        rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
        for v in cutlass.range_constexpr(VECTOR):
            rounded[v] = (values[v] * factor).to(self.dtype)
        cute.autovec_copy(rounded, cute.local_tile(mO[None, head, token], (VECTOR,), (vector,)))
        if vector == 0:
            mL[head, token] = lse

    @cute.jit
    def store_partial(
        self,
        parts: cute.Tensor,  # (VECTOR, vectors + 1, block_m, num_parts)
        num_rows: Int32,
        partial: cute.Tensor,  # (VECTOR, vectors + 1, block_m)
    ):
        """What this CTA found, for the last to read."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        first = cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_rows * self.vectors, self.threads, unroll=1):
            row, vector = index // self.vectors, index % self.vectors
            most, total = self.gather(
                parts[None, vector, row, None], parts[None, self.vectors, row, None],
                Int32(self.parts), values,
            )  # fmt: skip
            cute.autovec_copy(values, partial[None, vector, row])
            if vector == 0:
                partial[0, self.vectors, row] = most
                partial[1, self.vectors, row] = total

    @cute.jit
    def arrive(self, counter: cute.Pointer, num_parts: Int32, is_last: cute.Pointer):
        """Whether the CTAs of this tile have all left their parts; one is told so.

        The counter is zero before and after; ``is_last`` is a word of shared memory.
        """
        # The barrier hands the stores of all threads to one, whose atomic releases them.
        cute.arch.barrier()
        if cute.arch.thread_idx()[0] == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            last = Int32(before == num_parts - 1)
            if last == 1:
                cute.arch.store(counter, Int32(0))
            cute.arch.store(is_last, last)
        cute.arch.barrier()
        return cute.arch.load(is_last, Int32) == 1
