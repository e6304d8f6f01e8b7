"""Eight values a thread and turn: a word in, 16 or 32 bytes out."""

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


class Vectorized:
    """Rows follow one another without a seam; a thread has ``unroll`` words in flight."""

    def __init__(self, dtype: str, nvfp4: bool, swizzled: bool, threads: int, unroll: int):
        self.dtype, self.nvfp4, self.swizzled = element_type(dtype), nvfp4, swizzled
        self.threads, self.unroll = threads, unroll
        self.words = block_size(nvfp4) // CODES  # that share a scale

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
        ctas = Int32(cute.ceil_div(words, self.threads * self.unroll))
        self.kernel(mQ, mS, mG, mX, words, k // CODES).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (words,)
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mX: cute.Tensor,  # (8, words)
        end: Int64,  # words
        row_words: Int32,
    ):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        first = Int64(cta) * (self.threads * self.unroll) + tidx
        words = cute.make_rmem_tensor(self.unroll, Uint32)
        scales = cute.make_rmem_tensor(self.unroll, Uint32)
        words.fill(0)
        scales.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            at = first + i * self.threads
            if at < end:
                words[i] = mQ[at]
                scales[i] = Uint32(mS[self.place(at, row_words)])
        given = Float32(1)
        if cutlass.const_expr(self.nvfp4):
            given = mG[0]
        for i in cutlass.range_constexpr(self.unroll):
            at = first + i * self.threads
            if at < end:
                factor = scale_value(scales[i], self.nvfp4)
                values = cute.make_rmem_tensor(CODES, Float32)
                for j in cutlass.range_constexpr(CODES):
                    values[j] = code_value(words[i], j) * factor
                    if cutlass.const_expr(self.nvfp4):
                        values[j] = values[j] * given
                rounded = cute.make_rmem_tensor(CODES, self.dtype)
                rounded.store(values.load().to(self.dtype))
                cute.autovec_copy(rounded, mX[None, at])

    @cute.jit
    def place(self, at: Int64, row_words: Int32):
        """Where the scale of word ``at`` lies."""
        if cutlass.const_expr(self.swizzled):
            row = at // row_words
            col = Int32(at - row * row_words) // self.words
            found = scale_place(row, col, row_words // self.words, True)
        else:
            found = at // self.words
        return found
