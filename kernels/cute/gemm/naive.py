"""GEMM without tricks: one thread, one element of D, multiply-adds in float32."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.jit.cute import element_type

BLOCK = 16


class Naive:
    """Any shape, K = 0 included."""

    def __init__(self, dtype: str, bias: bool):
        self.dtype, self.has_bias = element_type(dtype), bias

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        d: cute.Pointer,  # (m, n)
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(Int64(k), 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(Int64(k), 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(Int64(n), 1)))
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        self.kernel(mA, mB, mBias, mD).launch(
            grid=(cute.ceil_div(n, BLOCK), cute.ceil_div(m, BLOCK), 1),
            block=(BLOCK, BLOCK, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mBias: cute.Tensor, mD: cute.Tensor):
        x, y, _ = cute.arch.thread_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        row, col = block_y * BLOCK + y, block_x * BLOCK + x
        if row < mD.shape[0] and col < mD.shape[1]:
            total = Float32(0)
            for i in cutlass.range(mA.shape[1]):
                total += Float32(mA[row, i]) * Float32(mB[col, i])
            if cutlass.const_expr(self.has_bias):
                total += Float32(mBias[col])
            mD[row, col] = total.to(self.dtype)
