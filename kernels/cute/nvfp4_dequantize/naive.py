"""Dequantize value by value: a thread computes all values of a block, which share a scale."""

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
    scale_offset,
    scale_value,
)

THREADS = 256


class Naive:
    """Dequantizes any shape."""

    def __init__(self, dtype: str, is_nvfp4: bool, is_swizzled: bool):
        self.dtype, self.is_nvfp4, self.is_swizzled = element_type(dtype), is_nvfp4, is_swizzled
        self.block_size = block_size(is_nvfp4)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (m, k / 8) words of eight codes
        scale: cute.Pointer,  # (m, k / 16 or 32) bytes; swizzled scales are padded
        global_scale: cute.Pointer,  # (1,) float32, for NVFP4
        x: cute.Pointer,  # (m, k)
        m: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        num_words = Int64(m) * (k // CODES)
        mQ = cute.make_tensor(q, cute.make_layout(num_words))
        mS = cute.make_tensor(scale, scale_layout(m, k))
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mX = cute.make_tensor(x, cute.make_layout((CODES, num_words), stride=(1, CODES)))
        num_blocks, row_blocks = num_words // (self.block_size // CODES), k // self.block_size
        num_ctas = Int32(cute.ceil_div(num_blocks, THREADS))
        self.kernel(mQ, mS, mG, mX, num_blocks, row_blocks).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (num_words,)
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mX: cute.Tensor,  # (8, num_words)
        num_blocks: Int64,
        row_blocks: Int32,
    ):
        block = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        if block < num_blocks:
            row = block // row_blocks
            col = Int32(block - row * row_blocks)
            offset = scale_offset(row, col, row_blocks, self.is_swizzled)
            scale = scale_value(Uint32(mS[offset]), self.is_nvfp4)
            for part in cutlass.range_constexpr(self.block_size // CODES):
                word_idx = block * (self.block_size // CODES) + part
                word = mQ[word_idx]
                for i in cutlass.range_constexpr(CODES):
                    value = code_value(word, i) * scale
                    if cutlass.const_expr(self.is_nvfp4):
                        value = value * mG[0]
                    if cutlass.const_expr(self.dtype is Float32):
                        mX[i, word_idx] = value
                    else:
                        mX[i, word_idx] = value.to(self.dtype)
