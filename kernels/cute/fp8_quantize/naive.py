"""Quantize block by block: one warp finds a block's largest element, then scales all of them."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse

WARPS = 4


class Naive:
    """Any shape. Blocks of ``block_rows`` x 128; a warp reads its block twice."""

    def __init__(self, dtype: str, block_rows: int):
        self.dtype, self.block_rows = element_type(dtype), block_rows

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, k)
        q: cute.Pointer,  # (m, k) float8_e4m3fn, as bytes
        scale: cute.Pointer,  # (k_blocks, m), or (m_blocks, k_blocks) for 128 rows; float32
        m: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        rows = cute.make_layout((m, k), stride=(Int64(k), 1))
        mX, mQ = cute.make_tensor(x, rows), cute.make_tensor(q, rows)
        m_blocks, k_blocks = cute.ceil_div(m, self.block_rows), cute.ceil_div(k, BLOCK)
        stride = (1, Int64(m)) if self.block_rows == 1 else (k_blocks, 1)
        mS = cute.make_tensor(scale, cute.make_layout((m_blocks, k_blocks), stride=stride))
        warps = m_blocks * k_blocks
        self.kernel(mX, mQ, mS).launch(
            grid=(cute.ceil_div(warps, WARPS), 1, 1), block=(32, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mQ: cute.Tensor, mS: cute.Tensor):
        lane, warp, _ = cute.arch.thread_idx()
        m_blocks, k_blocks = mS.shape
        block = cute.arch.block_idx()[0] * WARPS + warp
        m_idx, k_idx = block // k_blocks, block % k_blocks
        first_row, first_col = m_idx * self.block_rows, k_idx * BLOCK
        end_row = cutlass.min(first_row + self.block_rows, mX.shape[0])
        end_col = cutlass.min(first_col + BLOCK, mX.shape[1])
        if m_idx < m_blocks:
            amax = Float32(0)
            for row in cutlass.range(first_row, end_row, unroll=1):
                for col in cutlass.range(first_col + lane, end_col, 32, unroll=1):
                    amax = largest(amax, Float32(mX[row, col]))
            amax = cute.arch.warp_reduction_max(amax)
            scale, inverse = scale_and_inverse(amax)
            if lane == 0:
                mS[m_idx, k_idx] = scale
            value = cute.make_rmem_tensor(4, Float32)
            value.fill(0.0)
            for row in cutlass.range(first_row, end_row, unroll=1):
                for col in cutlass.range(first_col + lane, end_col, 32, unroll=1):
                    value[0] = Float32(mX[row, col]) * inverse
                    mQ[row, col] = Uint8(e4m3x4(value) & 0xFF)
