"""Quantize in one pass: elements stay in registers between the maximum and the scaling.

A CTA holds a tile of 128 columns in vectors of eight elements; 16 neighbouring threads hold a row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import BLOCK, e4m3x4, largest, scale_and_inverse

VECTOR = 8
ROW_THREADS = BLOCK // VECTOR


class Vectorized:
    """k is a multiple of 8. A thread holds ``unroll`` vectors, ``threads`` / 16 rows apart.

    Blocks are rows of 128 elements, or all of the tile where ``square`` (it then has 128 rows).
    """

    def __init__(self, dtype: str, square: bool, threads: int, unroll: int):
        self.dtype, self.square = element_type(dtype), square
        self.threads, self.unroll = threads, unroll
        self.rows_a_pass = threads // ROW_THREADS
        self.block_m = self.rows_a_pass * unroll

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, k)
        q: cute.Pointer,  # (m, k) float8_e4m3fn, four to a word
        scale: cute.Pointer,  # (k_blocks, m), or (m_blocks, k_blocks) for squares; float32
        m: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ):
        k_blocks, tiles_m = cute.ceil_div(k, BLOCK), cute.ceil_div(m, self.block_m)
        vectors = k // VECTOR
        stride = cute.assume(Int64(k), divby=VECTOR)
        mX = cute.make_tensor(x, cute.make_layout((VECTOR, vectors, m), stride=(1, VECTOR, stride)))
        words = VECTOR // 4
        stride = cute.assume(Int64(k // 4), divby=words)
        mQ = cute.make_tensor(q, cute.make_layout((words, vectors, m), stride=(1, words, stride)))
        blocks, stride = (tiles_m, k_blocks), (k_blocks, 1)
        if cutlass.const_expr(not self.square):
            blocks, stride = (m, k_blocks), (1, Int64(m))
        mS = cute.make_tensor(scale, cute.make_layout(blocks, stride=stride))
        self.kernel(mX, mQ, mS).launch(
            grid=(k_blocks * tiles_m, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (VECTOR, k / VECTOR, m)
        mQ: cute.Tensor,  # (VECTOR / 4, k / VECTOR, m), words
        mS: cute.Tensor,  # (m, k_blocks) or (m / 128, k_blocks)
    ):
        tidx, _, _ = cute.arch.thread_idx()
        tile, k_blocks = cute.arch.block_idx()[0], mS.shape[1]
        m_idx, k_idx = tile // k_blocks, tile % k_blocks
        vector = k_idx * ROW_THREADS + tidx % ROW_THREADS
        first = m_idx * self.block_m + tidx // ROW_THREADS
        inside = vector < mX.shape[1]
        held = cute.make_rmem_tensor((VECTOR, self.unroll), self.dtype)
        held.fill(0)
        for i in cutlass.range_constexpr(self.unroll):
            if inside and first + i * self.rows_a_pass < mX.shape[2]:
                cute.autovec_copy(mX[None, vector, first + i * self.rows_a_pass], held[None, i])

        if cutlass.const_expr(self.square):
            amax = Float32(0)
            for i in cutlass.range_constexpr(self.unroll):
                amax = largest(amax, self.vector_max(held[None, i]))
            scale, inverse = scale_and_inverse(self.cta_max(amax, tidx))
            if tidx == 0:
                mS[m_idx, k_idx] = scale
            for i in cutlass.range_constexpr(self.unroll):
                row = first + i * self.rows_a_pass
                if inside and row < mX.shape[2]:
                    self.store(held[None, i], inverse, mQ[None, vector, row])
        else:
            for i in cutlass.range_constexpr(self.unroll):
                row = first + i * self.rows_a_pass
                amax = cute.arch.warp_reduction_max(
                    self.vector_max(held[None, i]), threads_in_group=ROW_THREADS
                )
                scale, inverse = scale_and_inverse(amax)
                if row < mX.shape[2]:
                    if tidx % ROW_THREADS == 0:
                        mS[row, k_idx] = scale
                    if inside:
                        self.store(held[None, i], inverse, mQ[None, vector, row])

    @cute.jit
    def vector_max(self, held: cute.Tensor):
        amax = Float32(0)
        for v in cutlass.range_constexpr(VECTOR):
            amax = largest(amax, Float32(held[v]))
        return amax

    @cute.jit
    def cta_max(self, amax: Float32, tidx: Int32):
        """The largest of all threads' values, in every thread."""
        warps = self.threads // 32
        sMax = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), 16)
        amax = cute.arch.warp_reduction_max(amax)
        if tidx % 32 == 0:
            sMax[tidx // 32] = amax
        cute.arch.sync_threads()
        return cute.arch.warp_reduction_max(sMax[tidx % warps], threads_in_group=warps)

    @cute.jit
    def store(self, held: cute.Tensor, inverse: Float32, target: cute.Tensor):
        """Scale a vector and write it as two words."""
        scaled = cute.make_rmem_tensor((4, VECTOR // 4), Float32)
        words = cute.make_rmem_tensor(VECTOR // 4, Uint32)
        for v in cutlass.range_constexpr(VECTOR):
            scaled[v] = Float32(held[v]) * inverse
        for w in cutlass.range_constexpr(VECTOR // 4):
            words[w] = e4m3x4(scaled[None, w])
        cute.autovec_copy(words, target)
