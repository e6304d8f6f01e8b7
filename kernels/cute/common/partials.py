"""Merging partial results: row maxima, row sums and weighted sums of values of the same rows.

Warps and thread blocks that attended to different keys store their sums of values unscaled,
together with the row max that the sums are relative to. The reader scales and adds them. Where
thread blocks merge in device memory, the last one to arrive reads the partial results of all, in
the same order on every run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.kernels.cute.common.online_softmax import LOWEST, exp2, finish

VECTOR = 4
"""Floats in 16 bytes."""
PADDING = 8
"""Floats between rows, so that a warp writes to 32 different banks."""


def partial_layout(vector, head_dim, block_m, num_splits, tiles):
    """(vector, (head_dim + VECTOR) / vector, block_m, num_splits, tiles), in device memory."""
    pitch = head_dim + VECTOR
    split = pitch * block_m
    return cute.make_layout(
        (vector, pitch // vector, block_m, num_splits, tiles),
        stride=(1, vector, pitch, split, cute.assume(Int64(num_splits) * split, divby=VECTOR)),
    )


class Partials:
    """Partial results of ``block_m`` rows, by ``num_parts`` warps and several thread blocks.

    A row is its sums of values and one vector more: the row max, the row sum, and two unused
    floats.
    """

    def __init__(self, dtype, head_dim, block_m, row_halves, num_parts, threads, sinks, scales):
        self.dtype, self.head_dim, self.block_m = dtype, head_dim, block_m
        self.num_parts, self.row_halves = num_parts, row_halves
        self.sinks, self.tensor_scales = sinks, scales == "tensor"
        self.vectors, self.threads = head_dim // VECTOR, threads
        self.shared_bytes = 4 * (head_dim + PADDING) * block_m * num_parts

    def shared_layout(self):
        """(VECTOR, vectors + 1, block_m, num_parts)."""
        pitch = self.head_dim + PADDING
        return cute.make_layout(
            (VECTOR, self.vectors + 1, self.block_m, self.num_parts),
            stride=(1, VECTOR, pitch, pitch * self.block_m),
        )

    def partial_layout(self, tiles, num_splits):
        """(VECTOR, vectors + 1, block_m, num_splits, tiles), in device memory."""
        return partial_layout(VECTOR, self.head_dim, self.block_m, num_splits, tiles)

    @cute.jit
    def store_warp(
        self,
        out: cute.Tensor,  # ((2, 2), MMA_M, MMA_N), this thread's sums of values
        tCcO: cute.Tensor,  # as out: rows and columns
        value_column: cutlass.Constexpr,  # column of the product -> element of the head
        row_max: cute.Tensor,  # (rows of a thread,)
        row_sum: cute.Tensor,  # (rows of a thread,), of this thread's columns only
        sO: cute.Tensor,  # (VECTOR, vectors + 1, block_m), the place of this warp
    ):
        """Stores a warp's rows in shared memory."""
        for i in cutlass.range_constexpr(cute.size(out, mode=[1])):
            for half in cutlass.range_constexpr(self.row_halves):
                row = tCcO[(0, half), i, 0][0]
                sO[0, self.vectors, row] = row_max[2 * i + half]
                sO[1, self.vectors, row] = cute.arch.warp_reduction_sum(
                    row_sum[2 * i + half], threads_in_group=4
                )
                for j in cutlass.range_constexpr(cute.size(out, mode=[2])):
                    for c in cutlass.range_constexpr(2):
                        col = value_column(tCcO[(c, 0), 0, j][1])
                        sO[col % VECTOR, col // VECTOR, row] = out[(c, half), i, j]

    @cute.jit
    def merge(
        self,
        vectors: cute.Tensor,  # (VECTOR, num_parts): sums of values of a row
        row_stats: cute.Tensor,  # (VECTOR, num_parts): the row's max and sum
        num_parts: Int32,
        values: cute.Tensor,  # (VECTOR,), written
        unroll: cutlass.Constexpr[int] = 4,
    ):
        """Adds a vector of a row, relative to the largest row max; returns that max and the sum."""
        row_max, row_sum = Float32(LOWEST), Float32(0)
        for part in cutlass.range(num_parts, unroll=unroll):
            row_max = cute.arch.fmax(row_max, row_stats[0, part])
        values.fill(0.0)
        vector = cute.make_rmem_tensor(VECTOR, Float32)
        for part in cutlass.range(num_parts, unroll=unroll):
            weight = exp2(row_stats[0, part] - row_max)
            row_sum += weight * row_stats[1, part]
            cute.autovec_copy(vectors[None, part], vector)
            for v in cutlass.range_constexpr(VECTOR):
                values[v] += weight * vector[v]
        return row_max, row_sum

    @cute.jit
    def store(
        self,
        parts: cute.Tensor,  # (VECTOR, vectors + 1, block_m, num_parts)
        num_parts: Int32,
        num_rows: Int32,
        mO: cute.Tensor,  # (head_dim, group_size, query tokens) of the key-value head
        mL: cute.Tensor,  # (group_size, query tokens)
        mSinks: cute.Tensor,  # (group_size,)
        group_size: Int32,  # query heads of a key-value head
        row_begin: Int32,
        v_factor: Float32,
    ):
        """Merges all rows and stores them in out and lse."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        first = cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_rows * self.vectors, self.threads, unroll=1):
            row, vector = index // self.vectors, index % self.vectors
            row_max, row_sum = self.merge(
                parts[None, vector, row, None], parts[None, self.vectors, row, None],
                num_parts, values,
            )  # fmt: skip
            self.store_vector(
                values, row_max, row_sum, row_begin + row, vector, mO, mL, mSinks, group_size,
                v_factor,
            )  # fmt: skip

    @cute.jit
    def store_vector(
        self,
        values: cute.Tensor,  # (VECTOR,), relative to ``row_max``
        row_max: Float32,
        row_sum: Float32,
        row: Int32,
        vector: Int32,
        mO: cute.Tensor,  # (head_dim, group_size, query tokens)
        mL: cute.Tensor,  # (group_size, query tokens)
        mSinks: cute.Tensor,  # (group_size,)
        group_size: Int32,
        v_factor: Float32,
    ):
        """Stores a vector of a row of out; with vector 0 also the row's lse."""
        head, token = row % group_size, row // group_size
        sink = Float32(0)
        if cutlass.const_expr(self.sinks):
            sink = mSinks[head]
        factor, lse = finish(row_max, row_sum, sink, self.sinks)
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
        """Merges the warps' parts and stores this thread block's partial result."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        first = cute.arch.thread_idx()[0]
        for index in cutlass.range(first, num_rows * self.vectors, self.threads, unroll=1):
            row, vector = index // self.vectors, index % self.vectors
            row_max, row_sum = self.merge(
                parts[None, vector, row, None], parts[None, self.vectors, row, None],
                Int32(self.num_parts), values,
            )  # fmt: skip
            cute.autovec_copy(values, partial[None, vector, row])
            if vector == 0:
                partial[0, self.vectors, row] = row_max
                partial[1, self.vectors, row] = row_sum

    @cute.jit
    def arrive(self, counter: cute.Pointer, num_parts: Int32, is_last: cute.Pointer):
        """Counts this thread block; true in the one that arrives last at its tile's counter.

        The counter is zero before the kernel, and after it again. ``is_last`` points to a word of
        shared memory.
        """
        # The barrier orders the stores of all threads before the atomic, which releases them.
        cute.arch.barrier()
        if cute.arch.thread_idx()[0] == 0:
            num_arrived = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            last = Int32(num_arrived == num_parts - 1)
            if last == 1:
                cute.arch.store(counter, Int32(0))
            cute.arch.store(is_last, last)
        cute.arch.barrier()
        return cute.arch.load(is_last, Int32) == 1
