"""From the sums of a tile to rows of D, or to partial rows that a second kernel adds up.

A thread has one row of the weights, a column of Z = A @ W^T + bias, and all of the tile's rows of
A. Neighbouring threads exchange halves of their sums: each then has two neighbouring columns of
every other row, which are a gate and the value beside the gate, or one store.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.gating import gated


class Output:
    """Stores ``rows`` rows of a tile with a thread; ``activation`` is none, swiglu or swiglu_oai.

    ``is_even`` says whether the result has an even number of columns, so that pairs are stored.
    """

    def __init__(self, dtype: str, activation: str, bias: bool, is_even: bool, rows: int):
        self.dtype, self.activation, self.bias = element_type(dtype), activation, bias
        self.tile_rows, self.is_gated = rows, activation != "none"
        self.width = 2 if is_even and not self.is_gated else 1

    def rows(self, out: cute.Pointer, num_rows: Int32, pitch: Int32) -> cute.Tensor:
        """The result (width, pitch / width, rows)."""
        pitch = cute.assume(pitch, divby=self.width)
        layout = cute.make_layout(
            (self.width, pitch // self.width, num_rows),
            stride=(1, self.width, cute.assume(Int64(pitch), divby=self.width)),
        )
        return cute.make_tensor(out, layout)

    @cute.jit
    def bias_of(self, mBias: cute.Tensor, expert: Int32, col: Int32):
        """The bias of a column of Z; ``mBias`` is (n, experts). Columns past n are not stored."""
        value = Float32(0)
        if cutlass.const_expr(self.bias):
            value = Float32(mBias[cutlass.min(col, mBias.shape[0] - 1), expert])
        return value

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,  # (rows,) of this thread's column
        bias: Float32,
        mOut: cute.Tensor,  # (width, columns / width, rows)
        row: Int32,
        num_rows: Int32,
        col: Int32,
        n: Int32,
    ):
        """Stores ``num_rows`` rows from ``row`` on; ``col`` is this thread's column of Z."""
        odd = col % 2
        for i in cutlass.range_constexpr(0, self.tile_rows, 2):
            x, y = sums[i] + bias, sums[i + 1] + bias
            other = cute.arch.shuffle_sync_bfly(x if odd == 1 else y, 1)
            first, second = x, other
            if odd == 1:
                first, second = other, y
            if (i + odd < num_rows) & (col - odd < n):
                self.store_pair(first, second, mOut, row + i + odd, col - odd, n)

    @cute.jit
    def store_pair(
        self,
        first: Float32,
        second: Float32,
        mOut: cute.Tensor,  # (width, columns / width, rows)
        row: Int32,
        col: Int32,
        n: Int32,
    ):
        """Stores what columns ``col`` and ``col`` + 1 of Z make of a row; the first one is even."""
        if cutlass.const_expr(self.is_gated):
            mOut[0, col // 2, row] = gated(first, second, self.activation).to(self.dtype)
        elif cutlass.const_expr(self.width == 2):
            pair = cute.make_rmem_tensor(2, self.dtype)
            pair[0], pair[1] = first.to(self.dtype), second.to(self.dtype)
            cute.autovec_copy(pair, mOut[None, col // 2, row])
        else:
            mOut[0, col, row] = first.to(self.dtype)
            if col + 1 < n:
                mOut[0, col + 1, row] = second.to(self.dtype)

    @cute.jit
    def clear(
        self,
        mOut: cute.Tensor,  # (width, columns / width, rows)
        first: Int32,
        step: Int32,
        thread: Int32,
        threads: cutlass.Constexpr[int],
    ):
        """Sets row ``first`` and every ``step``-th one after it to zero."""
        zeros = cute.make_rmem_tensor(self.width, self.dtype)
        zeros.fill(0.0)
        for row in cutlass.range(first, mOut.shape[2], step, unroll=1):
            for i in cutlass.range(thread, mOut.shape[1], threads, unroll=1):
                cute.autovec_copy(zeros, mOut[None, i, row])
