"""Gate and quantize in one pass: products stay in registers between the maximum and the scaling.

A block of 128 products takes 512 bytes of a row of x, one 16-byte load of every lane of a warp. The
maximum of a block is one integer reduction, because floats that are not negative are ordered as
their bits are. A warp holds several blocks and divides once for all of them: lane i computes the
scale of block i.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.epilogue import silu
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse

VECTOR = 8
"""Elements of x in 16 bytes."""
PAIRS = VECTOR // 2
"""Gates with what they gate in a vector."""
LANES = BLOCK // PAIRS
"""Lanes that hold a block: all 32 of a warp."""


class Fused:
    """A warp holds ``unroll`` neighbouring rows of a block of columns; n is a multiple of 8.

    The scales of a warp's rows are neighbours in memory as well: one instruction writes them.
    """

    def __init__(self, dtype: str, warps: int, unroll: int):
        self.dtype = element_type(dtype)
        self.warps, self.unroll = warps, unroll

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, n), gates in the even columns
        q: cute.Pointer,  # (m, n / 2) float8_e4m3fn, four to a word
        scale: cute.Pointer,  # (num_col_blocks, m) float32
        m: Int32,
        n: Int32,
        stream: cuda.CUstream,
    ):
        num_vectors = n // VECTOR
        stride = cute.assume(Int64(n), divby=VECTOR)
        vectors = cute.make_layout((VECTOR, num_vectors, m), stride=(1, VECTOR, stride))
        mX = cute.make_tensor(x, vectors)
        mQ = cute.make_tensor(q, cute.make_layout((num_vectors, m), stride=(1, Int64(num_vectors))))
        num_col_blocks = cute.ceil_div(num_vectors, LANES)
        mS = cute.make_tensor(scale, cute.make_layout((m, num_col_blocks), stride=(1, Int64(m))))
        self.kernel(mX, mQ, mS).launch(
            grid=(num_col_blocks * cute.ceil_div(m, self.warps * self.unroll), 1, 1),
            block=(LANES, self.warps, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (VECTOR, n / VECTOR, m)
        mQ: cute.Tensor,  # (n / VECTOR, m) words
        mS: cute.Tensor,  # (m, num_col_blocks)
    ):
        lane, warp, _ = cute.arch.thread_idx()
        (num_vectors, m), num_col_blocks = mQ.shape, mS.shape[1]
        tile = cute.arch.block_idx()[0]
        row_tile, col_block = tile // num_col_blocks, tile % num_col_blocks
        vector = col_block * LANES + lane
        row_group = row_tile * self.warps + warp
        first = row_group * self.unroll
        gX = cute.local_tile(mX, (VECTOR, 1, self.unroll), (0, vector, row_group))
        gQ = cute.local_tile(mQ, (1, self.unroll), (vector, row_group))
        is_inside = vector < num_vectors
        rX = cute.make_rmem_tensor((VECTOR, self.unroll), self.dtype)
        rX.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if is_inside and first + i < m:
                cute.autovec_copy(gX[None, 0, i], rX[None, i])

        y = cute.make_rmem_tensor((PAIRS, self.unroll), Float32)
        amax = Float32(0)  # of row i in lane i
        for i in cutlass.range_constexpr(self.unroll):
            row_amax = self.gate(rX[None, i], y[None, i])
            if lane == i:
                amax = row_amax
        scale, inverse = scale_and_inverse(amax)
        if lane < self.unroll and first + lane < m:
            mS[first + lane, col_block] = scale

        for i in cutlass.range_constexpr(self.unroll):
            row_inverse = cute.arch.shuffle_sync(inverse, i)
            for p in cutlass.range_constexpr(PAIRS):
                y[p, i] = y[p, i] * row_inverse
            if is_inside and first + i < m:
                gQ[0, i] = e4m3x4(y[None, i])

    @cute.jit
    def gate(
        self,
        rX: cute.Tensor,  # (VECTOR,), a gate and what it gates by turns
        y: cute.Tensor,  # (PAIRS,) float32, written
    ):
        """Compute silu(gate) * up of four pairs; returns the largest magnitude of the warp's."""
        amax = Float32(0)
        for p in cutlass.range_constexpr(PAIRS):
            y[p] = silu(Float32(rX[2 * p])) * Float32(rX[2 * p + 1])
            amax = largest(amax, y[p])
        bits = cute.arch.warp_redux_sync(amax.bitcast(Uint32), "umax")
        return bits.bitcast(Float32)
