"""Copy rows in vectors of up to 16 bytes: every thread loads several, then stores them."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

THREADS = 256


class Vectorized:
    """``rows`` x ``row_bytes`` bytes, ``vector_bytes`` at a time; a row's tail goes byte by byte.

    A CTA takes chunks of ``THREADS * unroll`` vectors of one row. ``vector_bytes`` divides both
    strides. Matrices are seen as bytes: their elements do not matter.
    """

    def __init__(self, vector_bytes: int, unroll: int):
        self.vector_bytes, self.unroll = vector_bytes, unroll

    @cute.jit
    def __call__(
        self,
        src: cute.Pointer,  # (rows, row_bytes), rows src_stride bytes apart
        dst: cute.Pointer,  # (rows, row_bytes), rows dst_stride bytes apart
        rows: Int32,
        row_bytes: Int64,
        src_stride: Int64,
        dst_stride: Int64,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        vectors = Int32(row_bytes // self.vector_bytes)
        tail = Int32(row_bytes % self.vector_bytes)
        gS = self.view(src, rows, vectors, src_stride)
        gD = self.view(dst, rows, vectors, dst_stride)
        self.kernel(gS, gD, tail).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    def view(self, pointer, rows, vectors, stride):
        """(bytes of a vector, vectors a row, rows); the tail lies behind the last vector."""
        stride = cute.assume(stride, divby=self.vector_bytes)
        layout = cute.make_layout(
            (self.vector_bytes, vectors, rows), stride=(1, self.vector_bytes, stride)
        )
        return cute.make_tensor(pointer, layout)

    @cute.kernel
    def kernel(self, gS: cute.Tensor, gD: cute.Tensor, tail: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        vectors, rows = gS.shape[1], gS.shape[2]
        chunks_a_row = cutlass.max(cute.ceil_div(vectors, THREADS * self.unroll), 1)
        held = cute.make_rmem_tensor((self.vector_bytes, self.unroll), Uint8)
        for chunk in cutlass.range(block, rows * chunks_a_row, grid, unroll=1):
            row, part = chunk // chunks_a_row, chunk % chunks_a_row
            first = part * (THREADS * self.unroll) + tidx
            for i in cutlass.range_constexpr(self.unroll):
                if first + i * THREADS < vectors:
                    at = Int64(first + i * THREADS)  # its offset in bytes needs 64 bits
                    cute.autovec_copy(gS[None, at, row], held[None, i])
            for i in cutlass.range_constexpr(self.unroll):
                if first + i * THREADS < vectors:
                    at = Int64(first + i * THREADS)
                    cute.autovec_copy(held[None, i], gD[None, at, row])
            if part == chunks_a_row - 1 and tidx < tail:
                gD[tidx, Int64(vectors), row] = gS[tidx, Int64(vectors), row]
