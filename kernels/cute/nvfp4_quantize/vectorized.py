"""Quantize in one pass: a thread loads vectors of eight neighbours, 16 bytes each."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

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
    clear_padding,
    inverse_rms,
    random_words,
    round_to_float16,
    transform,
    tree_sum,
    warp_sum,
)

PADDING_CTAS = 64
"""Thread blocks that clear the padding of swizzled scales, beside those that quantize."""


class Vectorized:
    """A thread holds ``unroll`` vectors.

    With ``rms_norm`` a thread block holds one row (``unroll`` is a power of two); else thread
    blocks may begin and end within a row.
    """

    def __init__(
        self, dtype: str, is_nvfp4: bool, is_swizzled: bool, rms_norm: bool, hadamard: bool,
        stochastic: bool, threads: int, unroll: int,
    ):  # fmt: skip
        self.dtype, self.is_nvfp4, self.is_swizzled = element_type(dtype), is_nvfp4, is_swizzled
        self.rms_norm, self.hadamard, self.stochastic = rms_norm, hadamard, stochastic
        self.threads, self.unroll = threads, unroll
        self.block_lanes = block_size(is_nvfp4) // CODES  # lanes that share a scale

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
        row_vectors = k // CODES
        num_vectors = Int64(m) * row_vectors
        vectors = cute.make_layout((CODES, num_vectors), stride=(1, CODES))
        mX = cute.make_tensor(x, vectors)
        mW = cute.make_tensor(weight, cute.make_layout((CODES, row_vectors), stride=(1, CODES)))
        mQ = cute.make_tensor(q, cute.make_layout(num_vectors))
        mS = cute.make_tensor(scale, scale_layout(m, k))
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mSigns = cute.make_tensor(signs, cute.make_layout(16))
        mSeed = cute.make_tensor(seed, cute.make_layout(2))
        quantizing_ctas = m
        if cutlass.const_expr(not self.rms_norm):
            quantizing_ctas = Int32(cute.ceil_div(num_vectors, self.threads * self.unroll))
        num_ctas = quantizing_ctas
        if cutlass.const_expr(self.is_swizzled):
            num_ctas = quantizing_ctas + PADDING_CTAS
        self.kernel(mX, mW, mQ, mS, mG, mSigns, mSeed, m, k, quantizing_ctas, eps).launch(
            grid=(num_ctas, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (8, num_vectors)
        mW: cute.Tensor,  # (8, vectors of a row)
        mQ: cute.Tensor,  # (num_vectors,) words
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSigns: cute.Tensor,  # (16,)
        mSeed: cute.Tensor,  # (2,)
        m: Int32,
        k: Int32,
        quantizing_ctas: Int32,
        eps: Float32,
    ):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        row_vectors = k // CODES
        if cta >= quantizing_ctas:
            if cutlass.const_expr(self.is_swizzled):
                thread = Int64(cta - quantizing_ctas) * self.threads + tidx
                num_threads = Int64(PADDING_CTAS * self.threads)
                clear_padding(mS, m, row_vectors // self.block_lanes, thread, num_threads)
        elif cutlass.const_expr(self.rms_norm):
            self.normalize(mX, mW, mQ, mS, mG, mSigns, mSeed, cta, tidx, k, eps)
        else:
            self.quantize(mX, mQ, mS, mG, mSigns, mSeed, cta, tidx, k)

    @cute.jit
    def quantize(
        self,
        mX: cute.Tensor,  # (8, num_vectors)
        mQ: cute.Tensor,  # (num_vectors,) words
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSigns: cute.Tensor,  # (16,)
        mSeed: cute.Tensor,  # (2,)
        cta: Int32,
        tidx: Int32,
        k: Int32,
    ):
        """Quantize the vectors of a thread block."""
        num_vectors = mX.shape[1]
        first = Int64(cta) * (self.threads * self.unroll) + tidx
        rX = cute.make_rmem_tensor((CODES, self.unroll), self.dtype)
        rX.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if first + i * self.threads < num_vectors:
                cute.autovec_copy(mX[None, first + i * self.threads], rX[None, i])
        for i in cutlass.range_constexpr(self.unroll):
            h = cute.make_rmem_tensor(CODES, Float32)
            h.store(rX[None, i].load().to(Float32))
            vector = first + i * self.threads
            row, col = Int64(0), Int32(0)
            if cutlass.const_expr(self.is_swizzled):
                row = vector // (k // CODES)
                col = Int32(vector - row * (k // CODES))
            is_inside = vector < num_vectors
            self.write(h, mQ, mS, mG, mSigns, mSeed, vector, row, col, is_inside, tidx, k)

    @cute.jit
    def normalize(
        self,
        mX: cute.Tensor,  # (8, num_vectors)
        mW: cute.Tensor,  # (8, vectors of a row)
        mQ: cute.Tensor,  # (num_vectors,) words
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSigns: cute.Tensor,  # (16,)
        mSeed: cute.Tensor,  # (2,)
        cta: Int32,
        tidx: Int32,
        k: Int32,
        eps: Float32,
    ):
        """Normalize and quantize row ``cta``."""
        row_vectors = k // CODES
        first = Int64(cta) * row_vectors
        rX = cute.make_rmem_tensor((CODES, self.unroll), self.dtype)
        rX.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if tidx + i * self.threads < row_vectors:
                cute.autovec_copy(mX[None, first + tidx + i * self.threads], rX[None, i])
        factor = inverse_rms(self.squares_sum(rX, tidx), k, eps)
        for i in cutlass.range_constexpr(self.unroll):
            col = tidx + i * self.threads
            rW = cute.make_rmem_tensor(CODES, self.dtype)
            rW.fill(0)
            if col < row_vectors:
                cute.autovec_copy(mW[None, col], rW)
            h = cute.make_rmem_tensor(CODES, Float32)
            for j in cutlass.range_constexpr(CODES):
                h[j] = Float32(rX[j, i]) * factor * Float32(rW[j])
            is_inside = col < row_vectors
            self.write(
                h, mQ, mS, mG, mSigns, mSeed, first + col, Int64(cta), col, is_inside, tidx, k
            )

    @cute.jit
    def squares_sum(
        self,
        rX: cute.Tensor,  # (8, unroll)
        tidx: Int32,
    ):
        """The sum of the squares of a row, by a tree of neighbours, in every thread.

        Zeros fill the row up to a power of two.
        """
        num_warps = self.threads // 32
        num_sums = num_warps * self.unroll
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(num_sums), 16)
        for i in cutlass.range_constexpr(self.unroll):
            squares = cute.make_rmem_tensor(CODES, Float32)
            for j in cutlass.range_constexpr(CODES):
                squares[j] = Float32(rX[j, i]) * Float32(rX[j, i])
            total = warp_sum(tree_sum(squares))
            if tidx % 32 == 0:
                sSums[i * num_warps + tidx // 32] = total
        cute.arch.sync_threads()
        lane_sums = max(1, num_sums // 32)
        sums = cute.make_rmem_tensor(lane_sums, Float32)
        for i in cutlass.range_constexpr(lane_sums):
            sums[i] = Float32(0)
            if tidx % 32 * lane_sums + i < num_sums:
                sums[i] = sSums[tidx % 32 * lane_sums + i]
        return warp_sum(tree_sum(sums))

    @cute.jit
    def write(
        self,
        h: cute.Tensor,  # (8,) float32, overwritten
        mQ: cute.Tensor,  # (num_vectors,) words
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSigns: cute.Tensor,  # (16,)
        mSeed: cute.Tensor,  # (2,)
        vector: Int64,
        row: Int64,
        col: Int32,
        is_inside,
        tidx: Int32,
        k: Int32,
    ):
        """Write the codes of a vector; the first lane of a block writes the block's scale.

        All lanes of a warp call this together. ``row`` and ``col``, in vectors, are used by
        swizzled scales only.
        """
        if cutlass.const_expr(self.hadamard):
            transform(h, mSigns, tidx)
        amax = Float32(0)
        for j in cutlass.range_constexpr(CODES):
            amax = max_magnitude(amax, h[j])
        for level in cutlass.range_constexpr(self.block_lanes.bit_length() - 1):
            amax = max_magnitude(amax, cute.arch.shuffle_sync_bfly(amax, 1 << level))
        has_nan = amax != amax
        if has_nan:
            amax = Float32(0)
        global_scale = Float32(1)
        if cutlass.const_expr(self.is_nvfp4):
            global_scale = mG[0]
        code, inverse = block_scale(amax, global_scale, self.is_nvfp4)
        for j in cutlass.range_constexpr(CODES):
            h[j] = h[j] * inverse
        word = Uint32(0)
        if cutlass.const_expr(self.stochastic):
            round_to_float16(h)
            word = random_codes(h, random_words(mSeed, vector))
        else:
            word = nearest_codes(h)
        if has_nan:
            word = Uint32(0)
            code = Uint32(NAN_SCALE[self.is_nvfp4])
        if is_inside:
            mQ[vector] = word
            if tidx % self.block_lanes == 0:
                offset = vector // self.block_lanes
                if cutlass.const_expr(self.is_swizzled):
                    row_blocks = k // CODES // self.block_lanes
                    offset = scale_offset(row, col // self.block_lanes, row_blocks, True)
                mS[offset] = Uint8(code)
