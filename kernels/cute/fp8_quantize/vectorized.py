"""Quantize in one pass: elements stay in registers between the maximum and the scaling.

A thread block holds a tile of 128 columns in vectors of eight elements; 16 neighbouring threads
hold a row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse

VECTOR = 8
"""Elements of x in 16 bytes."""

ROW_THREADS = BLOCK // VECTOR
"""Threads that hold a row of a tile."""


class Vectorized:
    """A thread holds ``unroll`` vectors, ``threads`` / 16 rows apart; k is a multiple of 8.

    A scale is shared by 128 elements of a row, or with ``is_square`` by the whole tile, which then
    has 128 rows.
    """

    def __init__(self, dtype: str, is_square: bool, threads: int, unroll: int):
        self.dtype, self.is_square = element_type(dtype), is_square
        self.threads, self.unroll = threads, unroll
        self.pass_rows = threads // ROW_THREADS
        self.block_m = self.pass_rows * unroll

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, k)
        q: cute.Pointer,  # (m, k) float8_e4m3fn, four to a word
        scale: cute.Pointer,  # float32, (num_k_blocks, m) or square (num_m_blocks, num_k_blocks)
        m: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        num_k_blocks, num_tiles_m = cute.ceil_div(k, BLOCK), cute.ceil_div(m, self.block_m)
        num_vectors = k // VECTOR
        stride = cute.assume(Int64(k), divby=VECTOR)
        vectors = cute.make_layout((VECTOR, num_vectors, m), stride=(1, VECTOR, stride))
        mX = cute.make_tensor(x, vectors)
        num_words = VECTOR // 4
        stride = cute.assume(Int64(k // 4), divby=num_words)
        words = cute.make_layout((num_words, num_vectors, m), stride=(1, num_words, stride))
        mQ = cute.make_tensor(q, words)
        blocks, stride = (num_tiles_m, num_k_blocks), (num_k_blocks, 1)
        if cutlass.const_expr(not self.is_square):
            blocks, stride = (m, num_k_blocks), (1, Int64(m))
        mS = cute.make_tensor(scale, cute.make_layout(blocks, stride=stride))
        self.kernel(mX, mQ, mS).launch(
            grid=(num_k_blocks * num_tiles_m, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (VECTOR, k / VECTOR, m)
        mQ: cute.Tensor,  # (VECTOR / 4, k / VECTOR, m) words
        mS: cute.Tensor,  # (m, num_k_blocks) or (m / 128, num_k_blocks)
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, num_k_blocks = cute.arch.block_idx()[0], mS.shape[1]
        m_idx, k_idx = tile // num_k_blocks, tile % num_k_blocks
        vector = k_idx * ROW_THREADS + tidx % ROW_THREADS
        first = m_idx * self.block_m + tidx // ROW_THREADS
        is_inside = vector < mX.shape[1]
        rX = cute.make_rmem_tensor((VECTOR, self.unroll), self.dtype)
        rX.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if is_inside and first + i * self.pass_rows < mX.shape[2]:
                cute.autovec_copy(mX[None, vector, first + i * self.pass_rows], rX[None, i])

        if cutlass.const_expr(self.is_square):
            amax = Float32(0)
            for i in cutlass.range_constexpr(self.unroll):
                amax = largest(amax, self.vector_max(rX[None, i]))
            scale, inverse = scale_and_inverse(self.cta_max(amax, tidx))
            if tidx == 0:
                mS[m_idx, k_idx] = scale
            for i in cutlass.range_constexpr(self.unroll):
                row = first + i * self.pass_rows
                if is_inside and row < mX.shape[2]:
                    self.store(rX[None, i], inverse, mQ[None, vector, row])
        else:
            for i in cutlass.range_constexpr(self.unroll):
                row = first + i * self.pass_rows
                amax = cute.arch.warp_reduction_max(
                    self.vector_max(rX[None, i]), threads_in_group=ROW_THREADS
                )
                scale, inverse = scale_and_inverse(amax)
                if row < mX.shape[2]:
                    if tidx % ROW_THREADS == 0:
                        mS[row, k_idx] = scale
                    if is_inside:
                        self.store(rX[None, i], inverse, mQ[None, vector, row])

    @cute.jit
    def vector_max(
        self,
        rX: cute.Tensor,  # (VECTOR,)
    ):
        """The largest magnitude of a vector."""
        amax = Float32(0)
        for v in cutlass.range_constexpr(VECTOR):
            amax = largest(amax, Float32(rX[v]))
        return amax

    @cute.jit
    def cta_max(self, amax: Float32, tidx: Int32):
        """The maximum of ``amax`` over the thread block, in every thread."""
        num_warps = self.threads // 32
        sMax = SmemAllocator().allocate_tensor(Float32, cute.make_layout(num_warps), 16)
        amax = cute.arch.warp_reduction_max(amax)
        if tidx % 32 == 0:
            sMax[tidx // 32] = amax
        cute.arch.sync_threads()
        return cute.arch.warp_reduction_max(sMax[tidx % num_warps], threads_in_group=num_warps)

    @cute.jit
    def store(
        self,
        rX: cute.Tensor,  # (VECTOR,)
        inverse: Float32,
        target: cute.Tensor,  # (VECTOR / 4,) words in global memory
    ):
        """Scale a vector and write its codes as two words."""
        scaled = cute.make_rmem_tensor((4, VECTOR // 4), Float32)
        words = cute.make_rmem_tensor(VECTOR // 4, Uint32)
        for v in cutlass.range_constexpr(VECTOR):
            scaled[v] = Float32(rX[v]) * inverse
        for w in cutlass.range_constexpr(VECTOR // 4):
            words[w] = e4m3x4(scaled[None, w])
        cute.autovec_copy(words, target)
