"""Quantize block by block: one warp finds the largest element of a block, then scales them all."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse

WARPS = 4


class Naive:
    """Quantizes blocks of ``block_rows`` x 128, of any shape; a warp reads its block twice."""

    def __init__(self, dtype: str, block_rows: int):
        self.dtype, self.block_rows = element_type(dtype), block_rows

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, k)
        q: cute.Pointer,  # (m, k) float8_e4m3fn, as bytes
        scale: cute.Pointer,  # float32, (num_k_blocks, m) or square (num_m_blocks, num_k_blocks)
        m: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        rows = cute.make_layout((m, k), stride=(Int64(k), 1))
        mX, mQ = cute.make_tensor(x, rows), cute.make_tensor(q, rows)
        num_m_blocks, num_k_blocks = cute.ceil_div(m, self.block_rows), cute.ceil_div(k, BLOCK)
        stride = (1, Int64(m)) if self.block_rows == 1 else (num_k_blocks, 1)
        mS = cute.make_tensor(scale, cute.make_layout((num_m_blocks, num_k_blocks), stride=stride))
        num_blocks = num_m_blocks * num_k_blocks
        self.kernel(mX, mQ, mS).launch(
            grid=(cute.ceil_div(num_blocks, WARPS), 1, 1), block=(32, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (m, k)
        mQ: cute.Tensor,  # (m, k) bytes
        mS: cute.Tensor,  # (num_m_blocks, num_k_blocks)
    ):
        lane, warp, _ = cute.arch.thread_idx()
        num_m_blocks, num_k_blocks = mS.shape
        block = cute.arch.block_idx()[0] * WARPS + warp
        m_idx, k_idx = block // num_k_blocks, block % num_k_blocks
        first_row, first_col = m_idx * self.block_rows, k_idx * BLOCK
        end_row = cutlass.min(first_row + self.block_rows, mX.shape[0])
        end_col = cutlass.min(first_col + BLOCK, mX.shape[1])
        if m_idx < num_m_blocks:
            amax = Float32(0)
            for row in cutlass.range(first_row, end_row, unroll=1):
                for col in cutlass.range(first_col + lane, end_col, 32, unroll=1):
                    amax = largest(amax, Float32(mX[row, col]))
            amax = cute.arch.warp_reduction_max(amax)
            scale, inverse = scale_and_inverse(amax)
            if lane == 0:
                mS[m_idx, k_idx] = scale
            values = cute.make_rmem_tensor(4, Float32)
            values.fill(0.0)
            for row in cutlass.range(first_row, end_row, unroll=1):
                for col in cutlass.range(first_col + lane, end_col, 32, unroll=1):
                    values[0] = Float32(mX[row, col]) * inverse
                    mQ[row, col] = Uint8(e4m3x4(values) & 0xFF)
