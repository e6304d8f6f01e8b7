"""Gate and quantize block by block: one warp computes 128 neighbours of a row, four in a lane."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.epilogue import silu
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse

WARPS = 4
LANES = 32


class Naive:
    """A lane holds every 32nd column of its warp's block; n is even."""

    def __init__(self, dtype: str):
        self.dtype = element_type(dtype)

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, n), gates in the even columns
        q: cute.Pointer,  # (m, n / 2) float8_e4m3fn, as bytes
        scale: cute.Pointer,  # (num_col_blocks, m) float32
        m: Int32,
        n: Int32,
        stream: cuda.CUstream,
    ):
        num_cols, num_col_blocks = n // 2, cute.ceil_div(n // 2, BLOCK)
        mX = cute.make_tensor(x, cute.make_layout((2, num_cols, m), stride=(1, 2, Int64(n))))
        mQ = cute.make_tensor(q, cute.make_layout((num_cols, m), stride=(1, Int64(num_cols))))
        mS = cute.make_tensor(scale, cute.make_layout((m, num_col_blocks), stride=(1, Int64(m))))
        self.kernel(mX, mQ, mS).launch(
            grid=(cute.ceil_div(m * num_col_blocks, WARPS), 1, 1),
            block=(LANES, WARPS, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (2, num_cols, m)
        mQ: cute.Tensor,  # (num_cols, m)
        mS: cute.Tensor,  # (m, num_col_blocks)
    ):
        lane, warp, _ = cute.arch.thread_idx()
        (num_cols, m), num_col_blocks = mQ.shape, mS.shape[1]
        block = cute.arch.block_idx()[0] * WARPS + warp
        row, col_block = block // num_col_blocks, block % num_col_blocks
        first = col_block * BLOCK + lane
        if row < m:
            y = cute.make_rmem_tensor(BLOCK // LANES, Float32)
            y.fill(0.0)
            amax = Float32(0)
            for i in cutlass.range_constexpr(BLOCK // LANES):
                col = first + i * LANES
                if col < num_cols:
                    y[i] = silu(Float32(mX[0, col, row])) * Float32(mX[1, col, row])
                amax = largest(amax, y[i])
            scale, inverse = scale_and_inverse(cute.arch.warp_reduction_max(amax))
            if lane == 0:
                mS[row, col_block] = scale
            for i in cutlass.range_constexpr(BLOCK // LANES):
                y[i] = y[i] * inverse
            word = e4m3x4(y)
            for i in cutlass.range_constexpr(BLOCK // LANES):
                col = first + i * LANES
                if col < num_cols:
                    mQ[col, row] = Uint8(word >> (8 * i) & 0xFF)
