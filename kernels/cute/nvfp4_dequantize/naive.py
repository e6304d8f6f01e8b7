"""A thread a block of scales, value by value."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.fp4 import (
    CODES,
    block_size,
    code_value,
    scale_layout,
    scale_place,
    scale_value,
)

THREADS = 256


class Naive:
    """Any shape."""

    def __init__(self, dtype: str, nvfp4: bool, swizzled: bool):
        self.dtype, self.nvfp4, self.swizzled = element_type(dtype), nvfp4, swizzled
        self.size = block_size(nvfp4)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (m, k / 8) words of eight codes
        scale: cute.Pointer,  # (m, k / 16 or 32) bytes, or padded
        global_scale: cute.Pointer,  # (1,) float32, of NVFP4
        x: cute.Pointer,  # (m, k)
        m: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        words = Int64(m) * (k // CODES)
        mQ = cute.make_tensor(q, cute.make_layout(words))
        mS = cute.make_tensor(scale, scale_layout(m, k))
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mX = cute.make_tensor(x, cute.make_layout((CODES, words), stride=(1, CODES)))
        blocks = words // (self.size // CODES)
        self.kernel(mQ, mS, mG, mX, blocks, k // self.size).launch(
            grid=(Int32(cute.ceil_div(blocks, THREADS)), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (words,)
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mX: cute.Tensor,  # (8, words)
        blocks: Int64,
        num_blocks: Int32,  # of a row
    ):
        block = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        if block < blocks:
            row = block // num_blocks
            col = Int32(block - row * num_blocks)
            place = scale_place(row, col, num_blocks, self.swizzled)
            factor = scale_value(Uint32(mS[place]), self.nvfp4)
            for part in cutlass.range_constexpr(self.size // CODES):
                at = block * (self.size // CODES) + part
                word = mQ[at]
                for i in cutlass.range_constexpr(CODES):
                    value = code_value(word, i) * factor
                    if cutlass.const_expr(self.nvfp4):
                        value = value * mG[0]
                    if cutlass.const_expr(self.dtype is Float32):
                        mX[i, at] = value
                    else:
                        mX[i, at] = value.to(self.dtype)
