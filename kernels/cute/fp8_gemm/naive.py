"""Block-scaled product without tricks: one thread for each element of D, float32 throughout."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from kernelcat.kernels.cute.common.float8 import to_float

TILE = 16
"""Rows and columns of D that a thread block computes."""
BLOCK = 128
"""Columns of A and B, and rows of B, that share a scale."""


class Naive:
    """Computes any shape, K = 0 included."""

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k) float8_e4m3fn, as bytes
        a_scale: cute.Pointer,  # (num_k_blocks, m)
        b: cute.Pointer,  # (n, k) float8_e4m3fn, as bytes
        b_scale: cute.Pointer,  # (num_n_blocks, num_k_blocks)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        num_n_blocks, num_k_blocks = cute.ceil_div(n, BLOCK), cute.ceil_div(k, BLOCK)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(Int64(k), 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(Int64(k), 1)))
        mSA = cute.make_tensor(a_scale, cute.make_layout((m, num_k_blocks), stride=(1, Int64(m))))
        b_blocks = cute.make_layout((num_n_blocks, num_k_blocks), stride=(Int64(num_k_blocks), 1))
        mSB = cute.make_tensor(b_scale, b_blocks)
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(Int64(n), 1)))
        self.kernel(mA, mSA, mB, mSB, mD).launch(
            grid=(cute.ceil_div(n, TILE), cute.ceil_div(m, TILE), 1),
            block=(TILE, TILE, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (m, k) bytes
        mSA: cute.Tensor,  # (m, num_k_blocks)
        mB: cute.Tensor,  # (n, k) bytes
        mSB: cute.Tensor,  # (num_n_blocks, num_k_blocks)
        mD: cute.Tensor,  # (m, n)
    ):
        x, y, _ = cute.arch.thread_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        row, col = block_y * TILE + y, block_x * TILE + x
        if row < mD.shape[0] and col < mD.shape[1]:
            total = Float32(0)
            for block in cutlass.range(mSA.shape[1], unroll=1):
                part = Float32(0)
                end = cutlass.min((block + 1) * BLOCK, mA.shape[1])
                for i in cutlass.range(block * BLOCK, end, unroll=1):
                    part += to_float(mA[row, i]) * to_float(mB[col, i])
                total += part * mSA[row, block] * mSB[col // BLOCK, block]
            mD[row, col] = total.to(BFloat16)
