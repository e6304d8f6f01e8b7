"""GEMM without tricks: one thread for each element of D, multiply-adds in float32."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernelcat.kernels.cute.common.epilogue import Epilogue

BLOCK = 16


class Naive:
    """Computes any shape, K = 0 included."""

    def __init__(self, **epilogue: str | bool):
        self.epilogue = Epilogue(**epilogue)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        b: cute.Pointer,  # (n, k)
        bias: cute.Pointer,  # (n,)
        residual: cute.Pointer,  # like d
        d: cute.Pointer,  # (m, n), or (m, n / 2) of swiglu
        m: Int32,
        n: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        num_cols = n // self.epilogue.span
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(Int64(k), 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(Int64(k), 1)))
        mD = cute.make_tensor(d, cute.make_layout((m, num_cols), stride=(Int64(num_cols), 1)))
        mR = cute.make_tensor(residual, mD.layout)
        mBias = cute.make_tensor(bias, cute.make_layout(n))
        self.kernel(mA, mB, mBias, mR, mD).launch(
            grid=(cute.ceil_div(num_cols, BLOCK), cute.ceil_div(m, BLOCK), 1),
            block=(BLOCK, BLOCK, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,  # (m, k)
        mB: cute.Tensor,  # (n, k)
        mBias: cute.Tensor,  # (n,)
        mR: cute.Tensor,  # (m, columns of D)
        mD: cute.Tensor,  # (m, columns of D)
    ):
        x, y, _ = cute.arch.thread_idx()
        block_x, block_y, _ = cute.arch.block_idx()
        row, col = block_y * BLOCK + y, block_x * BLOCK + x
        if row < mD.shape[0] and col < mD.shape[1]:
            if cutlass.const_expr(self.epilogue.is_gated):
                gate = self.product(mA, mB, mBias, row, 2 * col)
                value = self.epilogue.gate(gate, self.product(mA, mB, mBias, row, 2 * col + 1))
            else:
                value = self.epilogue.activate(self.product(mA, mB, mBias, row, col))
            if cutlass.const_expr(self.epilogue.residual):
                value += Float32(mR[row, col])
            mD[row, col] = value.to(self.epilogue.dtype)

    @cute.jit
    def product(
        self,
        mA: cute.Tensor,  # (m, k)
        mB: cute.Tensor,  # (n, k)
        mBias: cute.Tensor,  # (n,)
        row: Int32,
        col: Int32,
    ):
        """Element (row, col) of A @ B^T + bias."""
        total = Float32(0)
        for i in cutlass.range(mA.shape[1]):
            total += Float32(mA[row, i]) * Float32(mB[col, i])
        if cutlass.const_expr(self.epilogue.bias):
            total += Float32(mBias[col])
        return total
