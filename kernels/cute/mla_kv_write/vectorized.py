"""Writes rows into a latent cache in vectors of 16 bytes: a warp holds a token in registers.

A warp starts to load its tokens before it looks up where they go.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.quantize import e4m3x4, largest
from kernelcat.kernels.cute.common.token_slots import position_of, sequence_of, slot_of
from kernelcat.kernels.cute.mla_kv_write.cached_row import rotated, scale_and_inverse
from kernelcat.reference._mla_row import LATENT, PACKED, ROPE, ROW, SCALED

LANES = 32
VECTOR = 8
"""Elements in 16 bytes."""
LANE_VECTORS = LATENT // VECTOR // LANES
"""Vectors of latent values that a lane takes."""
ROPE_LANES = ROPE // VECTOR // 2
"""Lanes that also take two vectors each of the elements that RoPE rotates, in whole pairs."""
SCALE_LANES = SCALED // VECTOR
"""Neighbouring lanes whose vectors share a scale."""


class Vectorized:
    """A warp takes ``unroll`` tokens, which are ``threads`` / 32 apart, and loads them together."""

    def __init__(
        self,
        dtype: str,
        packed: bool,
        page_size: int,
        interleaved: bool,
        rotates: bool,
        threads: int,
        unroll: int,
    ):
        self.dtype, self.packed, self.page_size = element_type(dtype), packed, page_size
        self.interleaved, self.rotates = interleaved, rotates
        self.threads, self.unroll = threads, unroll
        self.warps = threads // LANES

    @cute.jit
    def __call__(
        self,
        c: cute.Pointer,  # (tokens, LATENT)
        k_pe: cute.Pointer,  # (tokens, ROPE)
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        cos_sin: cute.Pointer,  # (positions, ROPE) float32
        kv_cache: cute.Pointer,  # (pages, page_size, ROW), or PACKED / 4 words
        tokens: Int32,
        batch: Int32,
        table_width: Int32,
        stream: cuda.CUstream,
    ):
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        if cutlass.const_expr(self.packed):
            # Eight latent values in float8 take two words, the four scales take four, and so do
            # eight elements in bfloat16.
            mC = vectors_of(kv_cache, 2, PACKED // 8)
            mS = vectors_of(cute.recast_ptr(kv_cache, dtype=Float32), 1, PACKED // 4)
            mR = vectors_of(cute.recast_ptr(kv_cache, dtype=BFloat16), VECTOR, PACKED // 16)
        else:
            mC = vectors_of(kv_cache, VECTOR, ROW // VECTOR)
            mS, mR = mC, mC
        self.kernel(
            vectors_of(c, VECTOR, LATENT // VECTOR),
            vectors_of(k_pe, VECTOR, ROPE // VECTOR),
            cute.make_tensor(block_table, table),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            vectors_of(cos_sin, VECTOR, ROPE // VECTOR),
            mC,
            mS,
            mR,
            tokens,
        ).launch(
            grid=(cute.ceil_div(tokens, self.warps * self.unroll), 1, 1),
            block=(LANES, self.warps, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (VECTOR, LATENT / VECTOR, tokens)
        mK: cute.Tensor,  # (VECTOR, ROPE / VECTOR, tokens)
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mA: cute.Tensor,  # (VECTOR, ROPE / VECTOR, positions): cosines, then sines
        mC: cute.Tensor,  # (VECTOR elements or 2 words, vectors, slots)
        mS: cute.Tensor,  # (1, PACKED / 4, slots): a packed mC as float32
        mR: cute.Tensor,  # (VECTOR, PACKED / 16, slots): a packed mC as bfloat16
        tokens: Int32,
    ):
        lane, warp, _ = cute.arch.thread_idx()
        first_token = cute.arch.block_idx()[0] * (self.warps * self.unroll) + warp
        low, high = 2 * lane, 2 * lane + 1
        if cutlass.const_expr(not self.interleaved):
            low, high = lane, lane + ROPE_LANES

        rX = cute.make_rmem_tensor((VECTOR, LANE_VECTORS, self.unroll), self.dtype)
        rK = cute.make_rmem_tensor((VECTOR, 2, self.unroll), self.dtype)
        rX.fill(0)
        rK.fill(0)
        for u in cutlass.range_constexpr(self.unroll):
            token = first_token + u * self.warps
            if token < tokens:
                for i in cutlass.range_constexpr(LANE_VECTORS):
                    cute.autovec_copy(mX[None, i * LANES + lane, token], rX[None, i, u])
                if lane < ROPE_LANES:
                    cute.autovec_copy(mK[None, low, token], rK[None, 0, u])
                    cute.autovec_copy(mK[None, high, token], rK[None, 1, u])

        for u in cutlass.range_constexpr(self.unroll):
            token = first_token + u * self.warps
            if token < tokens:
                seq = sequence_of(token, mStarts, mTable.shape[1])
                position = position_of(token, seq, mLens, mStarts)
                page = mTable[position // self.page_size, seq]
                slot = slot_of(page, position, self.page_size)
                if cutlass.const_expr(self.packed):
                    gC, gS = mC[None, None, slot], mS[0, None, slot]
                    self.quantize(rX[None, None, u], gC, gS, lane)
                else:
                    for i in cutlass.range_constexpr(LANE_VECTORS):
                        cute.autovec_copy(rX[None, i, u], mC[None, i * LANES + lane, slot])
                if lane < ROPE_LANES:
                    gR = mC[None, None, slot]
                    if cutlass.const_expr(self.packed):
                        gR = mR[None, None, slot]
                    gR = cute.domain_offset((0, cute.size(gR, mode=[1]) - ROPE // VECTOR), gR)
                    self.rotate(rK[None, None, u], mA[None, None, position], lane)
                    cute.autovec_copy(rK[None, 0, u], gR[None, low])
                    cute.autovec_copy(rK[None, 1, u], gR[None, high])

    @cute.jit
    def rotate(
        self,
        pairs: cute.Tensor,  # (VECTOR, 2), overwritten
        gA: cute.Tensor,  # (VECTOR, ROPE / VECTOR): cosines, then sines of a token
        lane: Int32,
    ):
        """Rotates the eight pairs of a lane, where the problem has RoPE."""
        if cutlass.const_expr(self.rotates):
            angles = cute.make_rmem_tensor((VECTOR, 2), Float32)
            cute.autovec_copy(gA[None, lane], angles[None, 0])
            cute.autovec_copy(gA[None, lane + ROPE_LANES], angles[None, 1])
            for i in cutlass.range_constexpr(VECTOR):
                first, second = i, i + VECTOR
                if cutlass.const_expr(self.interleaved):
                    first, second = 2 * i, 2 * i + 1
                x, y = rotated(
                    Float32(pairs[first]), Float32(pairs[second]), angles[i, 0], angles[i, 1]
                )
                pairs[first], pairs[second] = x.to(self.dtype), y.to(self.dtype)

    @cute.jit
    def quantize(
        self,
        rX: cute.Tensor,  # (VECTOR, LANE_VECTORS)
        gC: cute.Tensor,  # (2, vectors), written
        gS: cute.Tensor,  # (PACKED / 4,): gC as float32, written
        lane: Int32,
    ):
        """Writes a lane's latent values as float8, and the scales."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        words = cute.make_rmem_tensor(2, Uint32)
        halves = cute.make_tensor(values.iterator, cute.make_layout((4, 2)))
        for i in cutlass.range_constexpr(LANE_VECTORS):
            values.store(rX[None, i].load().to(Float32))
            amax = Float32(0)
            for v in cutlass.range_constexpr(VECTOR):
                amax = largest(amax, values[v])
            amax = cute.arch.warp_reduction_max(amax, threads_in_group=SCALE_LANES)
            scale, inverse = scale_and_inverse(amax)
            values.store(values.load() * inverse)
            for half in cutlass.range_constexpr(2):
                words[half] = e4m3x4(halves[None, half])
            cute.autovec_copy(words, gC[None, i * LANES + lane])
            if lane % SCALE_LANES == 0:
                gS[LATENT // 4 + i * (LANES // SCALE_LANES) + lane // SCALE_LANES] = scale


def vectors_of(pointer, vector, vectors):
    """(vector, vectors, rows): neighbouring rows of ``vectors`` vectors of ``vector`` elements."""
    row = vector * vectors
    stride = cute.assume(Int64(row), divby=row)
    return cute.make_tensor(
        pointer, cute.make_layout((vector, vectors, 1), stride=(1, vector, stride))
    )
