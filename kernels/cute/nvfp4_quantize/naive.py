"""Quantize element by element: a warp for each row, a lane for each block that shares a scale."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.fp4 import (
    CODES,
    NAN_SCALE,
    block_scale,
    block_size,
    max_magnitude,
    nearest_codes,
    random_codes,
    scale_layout,
    scale_offset,
)
from kernelcat.kernels.cute.nvfp4_quantize.options import (
    HADAMARD,
    butterflies,
    clear_padding,
    inverse_rms,
    random_words,
    round_to_float16,
    warp_sum,
)

WARPS = 4
LEVELS = 26
"""Levels of the tree that adds up the squares of a row: sums of 32, 64, ... squares."""


class Naive:
    """Quantizes any shape; with RMSNorm a warp reads its row twice."""

    def __init__(
        self, dtype: str, is_nvfp4: bool, is_swizzled: bool, rms_norm: bool, hadamard: bool,
        stochastic: bool,
    ):  # fmt: skip
        self.dtype, self.is_nvfp4, self.is_swizzled = element_type(dtype), is_nvfp4, is_swizzled
        self.rms_norm, self.hadamard, self.stochastic = rms_norm, hadamard, stochastic
        self.block_size = block_size(is_nvfp4)

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, k)
        global_scale: cute.Pointer,  # (1,) float32, for NVFP4
        weight: cute.Pointer,  # (k,), for RMSNorm
        signs: cute.Pointer,  # (16,) float32, for the Hadamard transform
        seed: cute.Pointer,  # (2,), for random rounding
        q: cute.Pointer,  # (m, k / 8) words of eight codes
        scale: cute.Pointer,  # (m, k / 16 or 32) bytes; swizzled scales are padded
        m: Int32,
        k: Int32,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        mX = cute.make_tensor(x, cute.make_layout((m, k), stride=(Int64(k), 1)))
        mW = cute.make_tensor(weight, cute.make_layout(k))
        mQ = cute.make_tensor(q, cute.make_layout(Int64(m) * (k // CODES)))
        mS = cute.make_tensor(scale, scale_layout(m, k))
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mSigns = cute.make_tensor(signs, cute.make_layout(HADAMARD))
        mSeed = cute.make_tensor(seed, cute.make_layout(2))
        self.kernel(mX, mW, mQ, mS, mG, mSigns, mSeed, m, eps).launch(
            grid=(cute.ceil_div(m, WARPS), 1, 1), block=(32, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (m, k)
        mW: cute.Tensor,  # (k,)
        mQ: cute.Tensor,  # words
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSigns: cute.Tensor,  # (16,)
        mSeed: cute.Tensor,  # (2,)
        m: Int32,
        eps: Float32,
    ):
        lane, warp, _ = cute.arch.thread_idx()
        row, k = cute.arch.block_idx()[0] * WARPS + warp, mX.shape[1]
        num_blocks = k // self.block_size
        if row < m:
            factor = Float32(1)
            if cutlass.const_expr(self.rms_norm):
                factor = inverse_rms(self.squares_sum(mX, row, lane), k, eps)
            for block in cutlass.range(lane, num_blocks, 32, unroll=1):
                h = cute.make_rmem_tensor(self.block_size, Float32)
                for i in cutlass.range_constexpr(self.block_size):
                    col = block * self.block_size + i
                    h[i] = Float32(mX[row, col])
                    if cutlass.const_expr(self.rms_norm):
                        h[i] = h[i] * factor * Float32(mW[col])
                    if cutlass.const_expr(self.hadamard):
                        h[i] = h[i] * mSigns[i % HADAMARD]
                self.write(h, mQ, mS, mG, mSeed, row, block, num_blocks)
        if cutlass.const_expr(self.is_swizzled):
            thread = Int64(row) * 32 + lane
            num_threads = Int64(cute.ceil_div(m, WARPS)) * (WARPS * 32)
            clear_padding(mS, m, num_blocks, thread, num_threads)

    @cute.jit
    def squares_sum(
        self,
        mX: cute.Tensor,  # (m, k)
        row: Int32,
        lane: Int32,
    ):
        """The sum of the squares of a row, in the order of a tree of neighbours.

        32 squares are added at a time. As in counting, a sum at level i waits for the next sum of
        as many squares, and both together are carried to level i + 1.
        """
        k = mX.shape[1]
        levels = cute.make_rmem_tensor(LEVELS, Float32)
        levels.fill(0.0)
        num_chunks = cute.ceil_div(k, 32)
        for chunk in cutlass.range(num_chunks, unroll=1):
            value = Float32(0)
            if chunk * 32 + lane < k:
                value = Float32(mX[row, chunk * 32 + lane])
            carry = warp_sum(value * value)
            for level in cutlass.range_constexpr(LEVELS):
                below = (1 << level) - 1
                if chunk & below == below:
                    if (chunk >> level) & 1 == 1:
                        carry = levels[level] + carry
                    else:
                        levels[level] = carry
        total = Float32(0)
        for level in cutlass.range_constexpr(LEVELS):
            if (num_chunks >> level) & 1 == 1:
                total = levels[level] + total
        return total

    @cute.jit
    def write(
        self,
        h: cute.Tensor,  # (block_size,) float32, overwritten
        mQ: cute.Tensor,  # words
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSeed: cute.Tensor,  # (2,)
        row: Int32,
        block: Int32,
        num_blocks: Int32,
    ):
        """Transform a block, where ``hadamard``, and write its codes and its scale."""
        if cutlass.const_expr(self.hadamard):
            for step in cutlass.range_constexpr(4):
                butterflies(h, 1 << step)
        amax = Float32(0)
        for i in cutlass.range_constexpr(self.block_size):
            if cutlass.const_expr(self.hadamard):
                h[i] = h[i] * Float32(0.25)
            amax = max_magnitude(amax, h[i])
        has_nan = amax != amax
        if has_nan:
            amax = Float32(0)
        global_scale = Float32(1)
        if cutlass.const_expr(self.is_nvfp4):
            global_scale = mG[0]
        code, inverse = block_scale(amax, global_scale, self.is_nvfp4)
        for part in cutlass.range_constexpr(self.block_size // CODES):
            word_idx = (Int64(row) * num_blocks + block) * (self.block_size // CODES) + part
            y = cute.make_rmem_tensor(CODES, Float32)
            for i in cutlass.range_constexpr(CODES):
                y[i] = h[part * CODES + i] * inverse
            word = Uint32(0)
            if cutlass.const_expr(self.stochastic):
                round_to_float16(y)
                word = random_codes(y, random_words(mSeed, word_idx))
            else:
                word = nearest_codes(y)
            if has_nan:
                word = Uint32(0)
            mQ[word_idx] = word
        if has_nan:
            code = Uint32(NAN_SCALE[self.is_nvfp4])
        mS[scale_offset(Int64(row), block, num_blocks, self.is_swizzled)] = Uint8(code)
