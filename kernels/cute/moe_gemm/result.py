"""The epilogue: a warpgroup's sums become rows of D, or partial rows, by stores of 16 bytes.

A tile of D may end anywhere, and the next row belongs to another expert, so rows are stored by
threads and not by TMA. Lanes of a quad exchange what they have of a row until each lane has 16
bytes of the row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kernelcat.kernels.cute.common.gating import gated

VECTOR = 8
"""Columns of D that a lane stores at once."""
QUAD = 4
WARPGROUP = 128


class Result:
    """What becomes of ``block_n`` columns of Z: bias, ``activation``, and elements of ``dtype``.

    With ``is_partial`` rows are float32, without activation, and as long as a multiple of 8. Else
    ``is_aligned`` means that rows of D are of a multiple of 8 elements.
    """

    def __init__(
        self,
        dtype: type,
        block_n: int,
        activation: str,
        bias: bool,
        is_partial: bool,
        is_aligned: bool,
    ):
        self.dtype, self.block_n, self.activation, self.bias = dtype, block_n, activation, bias
        self.is_gated, self.is_partial = activation != "none", is_partial
        self.is_aligned = is_aligned or is_partial
        self.span = 2 if self.is_gated else 1  # columns of Z that a column of D takes
        self.element = Float32 if is_partial else dtype
        self.vector = 16 // (self.element.width // 8)
        group = QUAD * self.vector
        assert block_n // self.span % group == 0 and not (is_partial and self.is_gated)
        self.num_groups = block_n // self.span // group
        self.bias_count = -(-block_n // WARPGROUP)  # elements of a thread

    def layout(self, rows: Int32, pitch: Int32):
        """Rows of ``pitch`` elements: (vector, vectors, rows), or (1, pitch, rows)."""
        vector = self.vector if self.is_aligned else 1
        stride = cute.assume(Int64(pitch), divby=vector)
        return cute.make_layout((vector, pitch // vector, rows), stride=(1, vector, stride))

    # ---- bias ----------------------------------------------------------------------------------

    @cute.jit
    def load_bias(
        self,
        mBias: cute.Tensor,  # (n, experts)
        expert: Int32,
        col: Int32,
        values: cute.Tensor,  # (bias_count,) float32, written
    ):
        """Loads this thread's part of the bias of a tile, zero beyond the last column."""
        if cutlass.const_expr(self.bias):
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            for i in cutlass.range_constexpr(self.bias_count):
                values[i] = 0.0
                at = i * WARPGROUP + thread
                if at < self.block_n and col + at < mBias.shape[0]:
                    values[i] = Float32(mBias[col + at, expert])

    @cute.jit
    def share_bias(
        self,
        values: cute.Tensor,  # (bias_count,)
        sBias: cute.Tensor,  # (2, block_n / 2) of the warpgroup, written
        barrier_id: Int32,
    ):
        """Makes the bias visible to the warpgroup, whose threads all call this."""
        if cutlass.const_expr(self.bias):
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            # The bias of the tile before has been read.
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)
            for i in cutlass.range_constexpr(self.bias_count):
                at = i * WARPGROUP + thread
                if at < self.block_n:
                    sBias[at % 2, at // 2] = values[i]
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=WARPGROUP)

    # ---- rows ----------------------------------------------------------------------------------

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,  # (2, 2, block_n / 8): neighbours, rows eight apart, octets of columns
        sBias: cute.Tensor,  # (2, block_n / 2)
        mOut: cute.Tensor,  # as ``layout`` gives it
        first_row: Int32,  # of the 64 rows, in the tile
        row: Int32,  # of the tile, in mOut
        num_rows: Int32,  # of the tile
        col: Int32,  # of the tile, a column of Z
    ):
        """Stores a warpgroup's 64 rows, without rows and columns that are outside."""
        tidx = cute.arch.thread_idx()[0]
        row_in_tile = first_row + tidx % WARPGROUP // 32 * 16 + tidx % 32 // QUAD
        values = cute.make_rmem_tensor((2, QUAD), Float32 if self.is_partial else self.dtype)
        vector = cute.make_rmem_tensor(self.vector, self.element)
        for half in cutlass.range_constexpr(2):
            at_row = row_in_tile + half * 8
            is_inside = at_row < num_rows
            for group in cutlass.range_constexpr(self.num_groups):
                if cutlass.const_expr(self.is_partial):
                    self.four_columns(sums, sBias, vector, group, half)
                else:
                    self.eight_columns(sums, sBias, values, vector, group, half)
                at_col = col // self.span // self.vector + group * QUAD + self.slot()
                self.store_vector(vector, mOut, row + at_row, at_col, is_inside)

    @cute.jit
    def biased(
        self,
        sums: cute.Tensor,  # (2, 2, block_n / 8)
        sBias: cute.Tensor,  # (2, block_n / 2)
        octet: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ):
        """This lane's two neighbours of Z plus bias in an octet of columns."""
        low, high = sums[4 * octet + 2 * half], sums[4 * octet + 2 * half + 1]
        if cutlass.const_expr(self.bias):
            pair = cute.make_rmem_tensor(2, Float32)
            lane = cute.arch.thread_idx()[0] % QUAD
            cute.autovec_copy(sBias[None, octet * QUAD + lane], pair)
            low, high = low + pair[0], high + pair[1]
        return low, high

    @cute.jit
    def eight_columns(
        self,
        sums: cute.Tensor,  # (2, 2, block_n / 8)
        sBias: cute.Tensor,  # (2, block_n / 2)
        values: cute.Tensor,  # (2, QUAD), overwritten
        vector: cute.Tensor,  # (8,), written
        group: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ):
        """Columns 8 * (lane % 4) to 8 * (lane % 4) + 7 of a group of 32 columns of D.

        Before the exchange a lane has two columns of each of four octets of D. These are 2 q and
        2 q + 1, q = lane % 4, or with a gate q and q + 4, which come from two octets of Z.
        """
        for i in cutlass.range_constexpr(QUAD):
            octet = group * QUAD + i
            if cutlass.const_expr(self.is_gated):
                low = gated(*self.biased(sums, sBias, 2 * octet, half), self.activation)
                high = gated(*self.biased(sums, sBias, 2 * octet + 1, half), self.activation)
            else:
                low, high = self.biased(sums, sBias, octet, half)
            values[0, i], values[1, i] = low.to(self.dtype), high.to(self.dtype)
        words = cute.recast_tensor(values, Uint32)
        transpose_quad(words)
        for i in cutlass.range_constexpr(QUAD):
            first, second = (i, i + QUAD) if self.is_gated else (2 * i, 2 * i + 1)
            vector[first], vector[second] = values[0, i], values[1, i]

    @cute.jit
    def four_columns(
        self,
        sums: cute.Tensor,  # (2, 2, block_n / 8)
        sBias: cute.Tensor,  # (2, block_n / 2)
        vector: cute.Tensor,  # (4,) float32, written
        group: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ):
        """Four columns of a group of 16 columns of Z, those of ``slot``.

        Before the exchange a lane has two columns of each of two octets. Lanes 2 q and 2 q + 1 have
        four neighbours of each octet: the even lane gets those of the first octet.
        """
        is_odd = cute.arch.thread_idx()[0] % 2 == 1
        first = self.biased(sums, sBias, 2 * group, half)
        second = self.biased(sums, sBias, 2 * group + 1, half)
        for c in cutlass.range_constexpr(2):
            received = cute.arch.shuffle_sync_bfly(first[c] if is_odd else second[c], 1)
            vector[c] = received if is_odd else first[c]
            vector[2 + c] = second[c] if is_odd else received

    @cute.jit
    def slot(self):
        """Which of the four vectors of a group of columns this lane has after the exchange."""
        lane = cute.arch.thread_idx()[0] % QUAD
        if cutlass.const_expr(self.is_partial):
            lane = lane % 2 * 2 + lane // 2
        return lane

    @cute.jit
    def store_vector(
        self,
        vector: cute.Tensor,  # (vector,)
        mOut: cute.Tensor,  # as ``layout`` gives it
        row: Int32,
        at: Int32,  # which vector of the row
        is_inside: Boolean,
    ):
        """Stores a lane's columns of a row where ``is_inside``, without columns outside."""
        if cutlass.const_expr(self.is_aligned):
            if is_inside and at < mOut.shape[1]:
                cute.autovec_copy(vector, mOut[None, at, row])
        else:
            for i in cutlass.range_constexpr(self.vector):
                if is_inside and at * self.vector + i < mOut.shape[1]:
                    mOut[0, at * self.vector + i, row] = vector[i]

    @cute.jit
    def clear(
        self,
        mOut: cute.Tensor,  # as ``layout`` gives it
        first: Int32,
        threads: cutlass.Constexpr[int],
    ):
        """Sets rows from ``first`` on to zero; all thread blocks share them."""
        zeros = cute.make_rmem_tensor(mOut.shape[0], self.element)
        zeros.fill(0.0)
        tidx, ctas = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0]
        for row in cutlass.range(first + cute.arch.block_idx()[0], mOut.shape[2], ctas, unroll=1):
            for at in cutlass.range(tidx, mOut.shape[1], threads, unroll=1):
                cute.autovec_copy(zeros, mOut[None, at, row])


@cute.jit
def transpose_quad(
    words: cute.Tensor,  # (QUAD,) of a lane, overwritten
):
    """Lane i of a quad gets word i of its four lanes, in the order of the lanes."""
    lane = cute.arch.thread_idx()[0] % QUAD
    for step in cutlass.range_constexpr(2):
        distance = 1 << step
        is_upper = lane // distance % 2 == 1
        for i in cutlass.range_constexpr(QUAD):
            if cutlass.const_expr(i // distance % 2 == 0):
                low, high = words[i], words[i + distance]
                received = cute.arch.shuffle_sync_bfly(low if is_upper else high, distance)
                words[i] = received if is_upper else low
                words[i + distance] = high if is_upper else received
