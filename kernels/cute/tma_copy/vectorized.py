"""Copy rows in vectors of up to 16 bytes: every thread loads several vectors, then stores them."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

THREADS = 256


class Vectorized:
    """Copies ``rows`` of ``row_bytes``, ``vector_bytes`` at a time, the rest of a row by bytes.

    A thread block copies chunks of ``THREADS * unroll`` vectors of one row. ``vector_bytes``
    divides both strides.
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
        num_vectors = Int32(row_bytes // self.vector_bytes)
        tail_bytes = Int32(row_bytes % self.vector_bytes)
        mS = self.view(src, rows, num_vectors, src_stride)
        mD = self.view(dst, rows, num_vectors, dst_stride)
        self.kernel(mS, mD, tail_bytes).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    def view(self, pointer, rows, num_vectors, stride):
        """(bytes of a vector, vectors of a row, rows); a row's tail lies behind the last vector."""
        stride = cute.assume(stride, divby=self.vector_bytes)
        layout = cute.make_layout(
            (self.vector_bytes, num_vectors, rows), stride=(1, self.vector_bytes, stride)
        )
        return cute.make_tensor(pointer, layout)

    @cute.kernel
    def kernel(
        self,
        mS: cute.Tensor,  # (vector_bytes, num_vectors, rows)
        mD: cute.Tensor,  # (vector_bytes, num_vectors, rows)
        tail_bytes: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        first_chunk, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        num_vectors, rows = mS.shape[1], mS.shape[2]
        row_chunks = cutlass.max(cute.ceil_div(num_vectors, THREADS * self.unroll), 1)
        rX = cute.make_rmem_tensor((self.vector_bytes, self.unroll), Uint8)
        for chunk in cutlass.range(first_chunk, rows * row_chunks, num_ctas, unroll=1):
            row, chunk_in_row = chunk // row_chunks, chunk % row_chunks
            first = chunk_in_row * (THREADS * self.unroll) + tidx
            for i in cutlass.range_constexpr(self.unroll):
                if first + i * THREADS < num_vectors:
                    vector = Int64(first + i * THREADS)  # the offset in bytes needs 64 bits
                    cute.autovec_copy(mS[None, vector, row], rX[None, i])
            for i in cutlass.range_constexpr(self.unroll):
                if first + i * THREADS < num_vectors:
                    vector = Int64(first + i * THREADS)
                    cute.autovec_copy(rX[None, i], mD[None, vector, row])
            if chunk_in_row == row_chunks - 1 and tidx < tail_bytes:
                mD[tidx, Int64(num_vectors), row] = mS[tidx, Int64(num_vectors), row]
