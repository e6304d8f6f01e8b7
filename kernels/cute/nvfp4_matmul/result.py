"""From accumulators of W @ A^T to rows of D, through shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.common.epilogue import PADDING, VECTOR


class Result:
    """Stores tiles of ``block_m`` rows of D and ``block_n`` rows of W with ``threads`` threads."""

    def __init__(self, epilogue, fp8: bool, block_m: int, block_n: int, threads: int):
        self.epilogue, self.fp8, self.threads = epilogue, fp8, threads
        self.block_m, self.block_n, self.pitch = block_m, block_n, block_n + PADDING

    @cute.jit
    def place(
        self,
        acc: cute.Tensor,  # ((2, 2), tiles of 16 rows of W, tiles of 8 rows of A)
        sZ: cute.Tensor,  # (block_n, block_m) float32
        first_n: Int32,
        first_m: Int32,
    ):
        """Write accumulators to shared memory.

        A lane has rows r and r + 8 of W and two neighbouring rows of A. The part of its warp begins
        in row ``first_n`` of W and row ``first_m`` of A of the tile.
        """
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            for j in cutlass.range_constexpr(cute.size(acc, mode=[2])):
                for half in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        n = first_n + i * 16 + half * 8 + lane // 4
                        sZ[n, first_m + j * 8 + lane % 4 * 2 + c] = acc[(c, half), i, j]

    @cute.jit
    def store(
        self,
        sZ: cute.Tensor,  # (block_n, block_m) float32
        mFactor: cute.Tensor,  # (m,)
        mBias: cute.Tensor,  # (8, n / 8)
        mD: cute.Tensor,  # (8, columns of D / 8, m)
        factor: Float32,
        row: Int32,
        col: Int32,
        tidx: Int32,
    ):
        """Apply the scales and the epilogue, and store D, eight columns at a time."""
        width = VECTOR * self.epilogue.span
        num_vectors = self.block_n // width
        z = cute.make_rmem_tensor(width, Float32)
        for index in cutlass.range(tidx, num_vectors * self.block_m, self.threads, unroll=1):
            tile_row, vector = index // num_vectors, index % num_vectors
            d_row, d_vector = row + tile_row, col // width + vector
            if d_row < mD.shape[2] and d_vector < mD.shape[1]:
                source = sZ.iterator + tile_row * self.pitch + vector * width
                cute.autovec_copy(
                    cute.make_tensor(source.align(16), cute.make_layout(width)), z
                )
                scale = factor
                if cutlass.const_expr(self.fp8):
                    scale = factor * mFactor[d_row]
                z.store(z.load() * scale)
                self.epilogue.store_vector(z, mBias, mD, mD, d_row, d_vector)
