"""Quantize in one pass: eight neighbours of a row a thread, 16 bytes a load."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.fp4 import (
    CODES,
    NAN,
    block_size,
    larger,
    nearest_codes,
    random_codes,
    scale_layout,
    scale_of,
    scale_place,
)
from kernelcat.kernels.cute.nvfp4_quantize.options import (
    clear_padding,
    inverse_root,
    lanes_sum,
    neighbours_sum,
    random_words,
    rotate,
    round_to_halves,
)

PADDING_CTAS = 64
"""CTAs that clear the padding of swizzled scales."""


class Vectorized:
    """``unroll`` vectors a thread: of the matrix without a seam, or with ``rms_norm`` of a row,
    which a CTA then holds (``unroll`` is a power of two).
    """

    def __init__(
        self, dtype: str, nvfp4: bool, swizzled: bool, rms_norm: bool, hadamard: bool,
        stochastic: bool, threads: int, unroll: int,
    ):  # fmt: skip
        self.dtype, self.nvfp4, self.swizzled = element_type(dtype), nvfp4, swizzled
        self.rms_norm, self.hadamard, self.stochastic = rms_norm, hadamard, stochastic
        self.threads, self.unroll = threads, unroll
        self.lanes = block_size(nvfp4) // CODES  # that share a scale

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, k)
        global_scale: cute.Pointer,  # (1,) float32, of NVFP4
        weight: cute.Pointer,  # (k,), of RMSNorm
        signs: cute.Pointer,  # (16,) float32, of the transform
        seed: cute.Pointer,  # (2,) of random rounding
        q: cute.Pointer,  # (m, k / 8) words of eight codes
        scale: cute.Pointer,  # (m, k / 16 or 32) bytes, or padded
        m: Int32,
        k: Int32,
        eps: Float32,
        stream: cuda.CUstream,
    ):
        row_vectors = k // CODES
        vectors = Int64(m) * row_vectors
        by_vectors = cute.make_layout((CODES, vectors), stride=(1, CODES))
        mX = cute.make_tensor(x, by_vectors)
        mW = cute.make_tensor(weight, cute.make_layout((CODES, row_vectors), stride=(1, CODES)))
        mQ = cute.make_tensor(q, cute.make_layout(vectors))
        mS = cute.make_tensor(scale, scale_layout(m, k))
        mG = cute.make_tensor(global_scale, cute.make_layout(1))
        mSigns = cute.make_tensor(signs, cute.make_layout(16))
        mSeed = cute.make_tensor(seed, cute.make_layout(2))
        main = m
        if cutlass.const_expr(not self.rms_norm):
            main = Int32(cute.ceil_div(vectors, self.threads * self.unroll))
        ctas = main
        if cutlass.const_expr(self.swizzled):
            ctas = main + PADDING_CTAS
        self.kernel(mX, mW, mQ, mS, mG, mSigns, mSeed, m, k, main, eps).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (8, vectors)
        mW: cute.Tensor,  # (8, vectors of a row)
        mQ: cute.Tensor,  # (vectors,)
        mS: cute.Tensor,  # bytes
        mG: cute.Tensor,  # (1,)
        mSigns: cute.Tensor,  # (16,)
        mSeed: cute.Tensor,  # (2,)
        m: Int32,
        k: Int32,
        main: Int32,
        eps: Float32,
    ):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        row_vectors = k // CODES
        if cta >= main:
            if cutlass.const_expr(self.swizzled):
                index = Int64(cta - main) * self.threads + tidx
                stride = Int64(PADDING_CTAS * self.threads)
                clear_padding(mS, m, row_vectors // self.lanes, index, stride)
        elif cutlass.const_expr(self.rms_norm):
            self.normalize(mX, mW, mQ, mS, mG, mSigns, mSeed, cta, tidx, k, eps)
        else:
            self.quantize(mX, mQ, mS, mG, mSigns, mSeed, cta, tidx, k)

    @cute.jit
    def quantize(self, mX, mQ, mS, mG, mSigns, mSeed, cta: Int32, tidx: Int32, k: Int32):
        vectors = mX.shape[1]
        first = Int64(cta) * (self.threads * self.unroll) + tidx
        held = cute.make_rmem_tensor((CODES, self.unroll), self.dtype)
        held.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if first + i * self.threads < vectors:
                cute.autovec_copy(mX[None, first + i * self.threads], held[None, i])
        for i in cutlass.range_constexpr(self.unroll):
            h = cute.make_rmem_tensor(CODES, Float32)
            h.store(held[None, i].load().to(Float32))
            index = first + i * self.threads
            row, col = Int64(0), Int32(0)
            if cutlass.const_expr(self.swizzled):
                row = index // (k // CODES)
                col = Int32(index - row * (k // CODES))
            inside = index < vectors
            self.write(h, mQ, mS, mG, mSigns, mSeed, index, row, col, inside, tidx, k)

    @cute.jit
    def normalize(self, mX, mW, mQ, mS, mG, mSigns, mSeed, cta: Int32, tidx: Int32, k: Int32, eps):
        """A row: its sum of squares, then its codes."""
        row_vectors = k // CODES
        first = Int64(cta) * row_vectors
        held = cute.make_rmem_tensor((CODES, self.unroll), self.dtype)
        held.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if tidx + i * self.threads < row_vectors:
                cute.autovec_copy(mX[None, first + tidx + i * self.threads], held[None, i])
        factor = inverse_root(self.squares_sum(held, tidx), k, eps)
        for i in cutlass.range_constexpr(self.unroll):
            col = tidx + i * self.threads
            weights = cute.make_rmem_tensor(CODES, self.dtype)
            weights.fill(0)
            if col < row_vectors:
                cute.autovec_copy(mW[None, col], weights)
            h = cute.make_rmem_tensor(CODES, Float32)
            for j in cutlass.range_constexpr(CODES):
                h[j] = Float32(held[j, i]) * factor * Float32(weights[j])
            inside = col < row_vectors
            self.write(
                h, mQ, mS, mG, mSigns, mSeed, first + col, Int64(cta), col, inside, tidx, k
            )

    @cute.jit
    def squares_sum(self, held: cute.Tensor, tidx: Int32):
        """Of a row: neighbours first, as if zeros filled it up to a power of two."""
        warps = self.threads // 32
        count = warps * self.unroll
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(count), 16)
        for i in cutlass.range_constexpr(self.unroll):
            squares = cute.make_rmem_tensor(CODES, Float32)
            for j in cutlass.range_constexpr(CODES):
                squares[j] = Float32(held[j, i]) * Float32(held[j, i])
            total = lanes_sum(neighbours_sum(squares))
            if tidx % 32 == 0:
                sSums[i * warps + tidx // 32] = total
        cute.arch.sync_threads()
        own = max(1, count // 32)
        sums = cute.make_rmem_tensor(own, Float32)
        for i in cutlass.range_constexpr(own):
            sums[i] = Float32(0)
            if tidx % 32 * own + i < count:
                sums[i] = sSums[tidx % 32 * own + i]
        return lanes_sum(neighbours_sum(sums))

    @cute.jit
    def write(
        self, h: cute.Tensor, mQ, mS, mG, mSigns, mSeed, index: Int64, row: Int64, col: Int32,
        inside, tidx: Int32, k: Int32,
    ):  # fmt: skip
        """Codes of a vector, and by the first lane of a block its scale; a warp together."""
        if cutlass.const_expr(self.hadamard):
            rotate(h, mSigns, tidx)
        amax = Float32(0)
        for j in cutlass.range_constexpr(CODES):
            amax = larger(amax, h[j])
        for level in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            amax = larger(amax, cute.arch.shuffle_sync_bfly(amax, 1 << level))
        missing = amax != amax
        if missing:
            amax = Float32(0)
        given = Float32(1)
        if cutlass.const_expr(self.nvfp4):
            given = mG[0]
        code, inverse = scale_of(amax, given, self.nvfp4)
        for j in cutlass.range_constexpr(CODES):
            h[j] = h[j] * inverse
        word = Uint32(0)
        if cutlass.const_expr(self.stochastic):
            round_to_halves(h)
            word = random_codes(h, random_words(mSeed, index))
        else:
            word = nearest_codes(h)
        if missing:
            word = Uint32(0)
            code = Uint32(NAN[self.nvfp4])
        if inside:
            mQ[index] = word
            if tidx % self.lanes == 0:
                place = index // self.lanes
                if cutlass.const_expr(self.swizzled):
                    place = scale_place(row, col // self.lanes, k // CODES // self.lanes, True)
                mS[place] = Uint8(code)
