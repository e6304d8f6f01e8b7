"""Products of a warp of `split`: queries with its tokens, weights with its columns of values."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from kernelcat.reference._mla_row import ROW

BLOCK_M = 16
"""Rows of a thread block."""


class Products:
    """A base class of `Split`; uses its ``dtype``, ``block_n``, ``tokens`` and ``columns``."""

    @cute.jit
    def multiply_keys(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,  # ((2, 2), 1, tokens / 8), written
        sQ: cute.Tensor,  # (BLOCK_M, ROW)
        sK: cute.Tensor,  # (tokens, ROW)
        lane: Int32,
    ):
        """Scores: the products of all rows with a warp's tokens."""
        acc.fill(0.0)
        thr_mma = tiled_mma.get_slice(lane)
        matrices = 4 if self.tokens >= 16 else 2
        a_copy = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), tiled_mma
        )
        b_copy = cute.make_tiled_copy_B(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, matrices), self.dtype), tiled_mma
        )
        tSrQ = tiled_mma.make_fragment_A(thr_mma.partition_A(sQ))
        tSrK = tiled_mma.make_fragment_B(thr_mma.partition_B(sK))
        tSsQ, tXrQ = a_copy.get_slice(lane).partition_S(sQ), a_copy.retile(tSrQ)
        tSsK, tXrK = b_copy.get_slice(lane).partition_S(sK), b_copy.retile(tSrK)
        for k in cutlass.range_constexpr(ROW // 16):
            cute.copy(a_copy, tSsQ[None, None, k], tXrQ[None, None, k])
            cute.copy(b_copy, tSsK[None, None, k], tXrK[None, None, k])
            cute.gemm(tiled_mma, acc, tSrQ[None, None, k], tSrK[None, None, k], acc)

    @cute.jit
    def add_values(
        self,
        tiled_mma: cute.TiledMma,
        out: cute.Tensor,  # ((2, 2), 1, columns / 8)
        weights: cute.Tensor,  # ((2, 2), 1, block_n / 8)
        sV: cute.Tensor,  # (block_n, columns)
        lane: Int32,
    ):
        """Adds a warp's columns of the values, times their weights, to ``out``."""
        rounded = cute.make_rmem_tensor_like(weights, self.dtype)
        rounded.store(weights.load().to(self.dtype))
        operand = cute.make_tensor(
            rounded.iterator,
            cute.make_layout(((2, 2, 2), 1, self.block_n // 16), stride=((1, 2, 4), 0, 8)),
        )
        sV = cute.composition(
            sV,
            cute.make_layout((self.columns, self.block_n), stride=(self.block_n, 1)),
        )
        copy = cute.make_tiled_copy_B(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), tiled_mma
        )
        tOrV = tiled_mma.make_fragment_B(tiled_mma.get_slice(lane).partition_B(sV))
        tOsV, tXrV = copy.get_slice(lane).partition_S(sV), copy.retile(tOrV)
        for k in cutlass.range_constexpr(self.block_n // 16):
            cute.copy(copy, tOsV[None, None, k], tXrV[None, None, k])
            cute.gemm(tiled_mma, out, operand[None, None, k], tOrV[None, None, k], out)
