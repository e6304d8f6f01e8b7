"""Dequantize words of eight codes: a thread loads several, and stores 16 or 32 bytes for each."""

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


class Vectorized:
    """A thread has ``unroll`` words in flight; thread blocks may begin and end within a row."""

    def __init__(self, dtype: str, is_nvfp4: bool, is_swizzled: bool, threads: int, unroll: int):
        self.dtype, self.is_nvfp4, self.is_swizzled = element_type(dtype), is_nvfp4, is_swizzled
        self.threads, self.unroll = threads, unroll
        self.block_words = block_size(is_nvfp4) // CODES  # words that share a scale

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
        num_ctas = Int32(cute.ceil_div(num_words, self.threads * self.unroll))
        self.kernel(mQ, mS, mG, mX, num_words, k // CODES).launch(
            grid=(num_ctas, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (num_words,)
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mX: cute.Tensor,  # (8, num_words)
        num_words: Int64,
        row_words: Int32,
    ):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        first = Int64(cta) * (self.threads * self.unroll) + tidx
        words = cute.make_rmem_tensor(self.unroll, Uint32)
        scales = cute.make_rmem_tensor(self.unroll, Uint32)
        words.fill(0)
        scales.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            word_idx = first + i * self.threads
            if word_idx < num_words:
                words[i] = mQ[word_idx]
                scales[i] = Uint32(mS[self.scale_offset(word_idx, row_words)])
        global_scale = Float32(1)
        if cutlass.const_expr(self.is_nvfp4):
            global_scale = mG[0]
        for i in cutlass.range_constexpr(self.unroll):
            word_idx = first + i * self.threads
            if word_idx < num_words:
                scale = scale_value(scales[i], self.is_nvfp4)
                values = cute.make_rmem_tensor(CODES, Float32)
                for j in cutlass.range_constexpr(CODES):
                    values[j] = code_value(words[i], j) * scale
                    if cutlass.const_expr(self.is_nvfp4):
                        values[j] = values[j] * global_scale
                rounded = cute.make_rmem_tensor(CODES, self.dtype)
                rounded.store(values.load().to(self.dtype))
                cute.autovec_copy(rounded, mX[None, word_idx])

    @cute.jit
    def scale_offset(self, word_idx: Int64, row_words: Int32):
        """Offset of the scale that the codes of a word share."""
        if cutlass.const_expr(self.is_swizzled):
            row = word_idx // row_words
            col = Int32(word_idx - row * row_words) // self.block_words
            offset = scale_offset(row, col, row_words // self.block_words, True)
        else:
            offset = word_idx // self.block_words
        return offset
