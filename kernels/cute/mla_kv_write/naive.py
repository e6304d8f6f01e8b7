"""Writes rows into a latent cache without tricks: one warp per token, one element at a time."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import e4m3
from kernelcat.kernels.cute.common.quantize import largest
from kernelcat.kernels.cute.common.token_slots import position_of, sequence_of, slot_of
from kernelcat.kernels.cute.mla_kv_write.cached_row import rotated, scale_and_inverse
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, ROW, SCALED

WARPS = 4
LANES = 32


class Naive:
    """Any shape. A lane takes every 32nd latent value, and one pair that RoPE rotates."""

    def __init__(self, dtype: str, packed: bool, page_size: int, interleaved: bool, rotates: bool):
        self.dtype, self.packed, self.page_size = element_type(dtype), packed, page_size
        self.interleaved, self.rotates = interleaved, rotates

    @cute.jit
    def __call__(
        self,
        c: cute.Pointer,  # (tokens, LATENT)
        k_pe: cute.Pointer,  # (tokens, ROPE)
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        cos_sin: cute.Pointer,  # (positions, ROPE) float32
        kv_cache: cute.Pointer,  # (pages, page_size, ROW), or PACKED bytes
        tokens: Int32,
        batch: Int32,
        table_width: Int32,
        stream: cuda.CUstream,
    ):
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        mC = rows_of(kv_cache, PACKED if self.packed else ROW)
        mS, mR = mC, mC
        if cutlass.const_expr(self.packed):
            mS = rows_of(cute.recast_ptr(kv_cache, dtype=Float32), PACKED // 4)
            mR = rows_of(cute.recast_ptr(kv_cache, dtype=BFloat16), PACKED // 2)
        self.kernel(
            rows_of(c, LATENT),
            rows_of(k_pe, ROPE),
            cute.make_tensor(block_table, table),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            rows_of(cos_sin, ROPE),
            mC,
            mS,
            mR,
            tokens,
        ).launch(grid=(cute.ceil_div(tokens, WARPS), 1, 1), block=(LANES, WARPS, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (LATENT, tokens)
        mK: cute.Tensor,  # (ROPE, tokens)
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mA: cute.Tensor,  # (ROPE, positions): cosines, then sines
        mC: cute.Tensor,  # (ROW or PACKED, slots)
        mS: cute.Tensor,  # (PACKED / 4, slots): a packed mC as float32
        mR: cute.Tensor,  # (PACKED / 2, slots): a packed mC as bfloat16
        tokens: Int32,
    ):
        lane, warp, _ = cute.arch.thread_idx()
        token = cute.arch.block_idx()[0] * WARPS + warp
        if token < tokens:
            seq = sequence_of(token, mStarts, mTable.shape[1])
            position = position_of(token, seq, mLens, mStarts)
            slot = slot_of(mTable[position // self.page_size, seq], position, self.page_size)
            first, second = lane, lane + ROPE // 2
            if cutlass.const_expr(self.interleaved):
                first, second = 2 * lane, 2 * lane + 1
            x, y = Float32(mK[first, token]), Float32(mK[second, token])
            if cutlass.const_expr(self.rotates):
                x, y = rotated(x, y, mA[lane, position], mA[lane + ROPE // 2, position])
            if cutlass.const_expr(self.packed):
                self.quantize(mX[None, token], mC[None, slot], mS[None, slot], lane)
                mR[PACKED // 2 - ROPE + first, slot] = x.to(BFloat16)
                mR[PACKED // 2 - ROPE + second, slot] = y.to(BFloat16)
            else:
                for i in cutlass.range_constexpr(LATENT // LANES):
                    mC[i * LANES + lane, slot] = mX[i * LANES + lane, token]
                mC[LATENT + first, slot] = x.to(self.dtype)
                mC[LATENT + second, slot] = y.to(self.dtype)

    @cute.jit
    def quantize(
        self,
        gX: cute.Tensor,  # (LATENT,)
        gC: cute.Tensor,  # (PACKED,), written
        gS: cute.Tensor,  # (PACKED / 4,): gC as float32, written
        lane: Int32,
    ):
        """Writes the latent values of a token as float8, and their scales."""
        values = cute.make_rmem_tensor(SCALED // LANES, Float32)
        for group in cutlass.range_constexpr(LATENT // SCALED):
            amax = Float32(0)
            for i in cutlass.range_constexpr(SCALED // LANES):
                values[i] = Float32(gX[group * SCALED + i * LANES + lane])
                amax = largest(amax, values[i])
            scale, inverse = scale_and_inverse(cute.arch.warp_reduction_max(amax))
            for i in cutlass.range_constexpr(SCALED // LANES):
                gC[group * SCALED + i * LANES + lane] = e4m3(values[i] * inverse)
            if lane == 0:
                gS[LATENT // 4 + group] = scale


def rows_of(pointer, row):
    """(row, rows): neighbouring rows of ``row`` elements."""
    return cute.make_tensor(pointer, cute.make_layout((row, 1), stride=(1, Int64(row))))
