"""Rows into a latent cache in vectors of 16 bytes: a warp has a token, all of it in registers.

Rows are asked for before it is known where their token goes.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.token_slots import position_of, sequence_of, slot_of
from kernelcat.kernels.cute.fp8_quantize.scaling import e4m3x4, largest
from kernelcat.kernels.cute.mla_kv_write.row import (
    LATENT,
    PACKED,
    ROPE,
    ROW,
    SCALED,
    scale_and_inverse,
    turned,
)

LANES = 32
VECTOR = 8
"""Elements in 16 bytes."""
PASSES = LATENT // VECTOR // LANES
"""Vectors of a latent that a lane has."""
TURNING = ROPE // VECTOR // 2
"""Lanes that have two vectors of the key each, which hold whole pairs."""
SHARING = SCALED // VECTOR
"""Lanes side by side whose vectors share a scale."""


class Vectorized:
    """A warp has ``unroll`` tokens, ``threads`` / 32 apart, and asks for all of them at once."""

    def __init__(
        self,
        dtype: str,
        packed: bool,
        page_size: int,
        interleaved: bool,
        turns: bool,
        threads: int,
        unroll: int,
    ):
        self.dtype, self.packed, self.page_size = element_type(dtype), packed, page_size
        self.interleaved, self.turns = interleaved, turns
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
            # Two words hold a vector of float8, four the scales, or a vector of bfloat16.
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
        mS: cute.Tensor,  # (1, PACKED / 4, slots): the same as float32
        mR: cute.Tensor,  # (VECTOR, PACKED / 16, slots): the same as bfloat16
        tokens: Int32,
    ):
        lane, warp, _ = cute.arch.thread_idx()
        first_token = cute.arch.block_idx()[0] * (self.warps * self.unroll) + warp
        low, high = 2 * lane, 2 * lane + 1
        if cutlass.const_expr(not self.interleaved):
            low, high = lane, lane + TURNING

        held = cute.make_rmem_tensor((VECTOR, PASSES, self.unroll), self.dtype)
        keys = cute.make_rmem_tensor((VECTOR, 2, self.unroll), self.dtype)
        held.fill(0)
        keys.fill(0)
        for u in cutlass.range_constexpr(self.unroll):
            token = first_token + u * self.warps
            if token < tokens:
                for i in cutlass.range_constexpr(PASSES):
                    cute.autovec_copy(mX[None, i * LANES + lane, token], held[None, i, u])
                if lane < TURNING:
                    cute.autovec_copy(mK[None, low, token], keys[None, 0, u])
                    cute.autovec_copy(mK[None, high, token], keys[None, 1, u])

        for u in cutlass.range_constexpr(self.unroll):
            token = first_token + u * self.warps
            if token < tokens:
                seq = sequence_of(token, mStarts, mTable.shape[1])
                position = position_of(token, seq, mLens, mStarts)
                page = mTable[position // self.page_size, seq]
                slot = slot_of(page, position, self.page_size)
                if cutlass.const_expr(self.packed):
                    gC, gS = mC[None, None, slot], mS[0, None, slot]
                    self.quantize(held[None, None, u], gC, gS, lane)
                else:
                    for i in cutlass.range_constexpr(PASSES):
                        cute.autovec_copy(held[None, i, u], mC[None, i * LANES + lane, slot])
                if lane < TURNING:
                    gR = mC[None, None, slot]
                    if cutlass.const_expr(self.packed):
                        gR = mR[None, None, slot]
                    gR = cute.domain_offset((0, cute.size(gR, mode=[1]) - ROPE // VECTOR), gR)
                    self.turn(keys[None, None, u], mA[None, None, position], lane)
                    cute.autovec_copy(keys[None, 0, u], gR[None, low])
                    cute.autovec_copy(keys[None, 1, u], gR[None, high])

    @cute.jit
    def turn(self, keys: cute.Tensor, gA: cute.Tensor, lane: Int32):
        """Eight pairs of (VECTOR, 2) elements by angles (VECTOR, ROPE / VECTOR) of the token."""
        if cutlass.const_expr(self.turns):
            angles = cute.make_rmem_tensor((VECTOR, 2), Float32)
            cute.autovec_copy(gA[None, lane], angles[None, 0])
            cute.autovec_copy(gA[None, lane + TURNING], angles[None, 1])
            for i in cutlass.range_constexpr(VECTOR):
                first, second = i, i + VECTOR
                if cutlass.const_expr(self.interleaved):
                    first, second = 2 * i, 2 * i + 1
                x, y = turned(
                    Float32(keys[first]), Float32(keys[second]), angles[i, 0], angles[i, 1]
                )
                keys[first], keys[second] = x.to(self.dtype), y.to(self.dtype)

    @cute.jit
    def quantize(
        self,
        held: cute.Tensor,  # (VECTOR, PASSES)
        gC: cute.Tensor,  # (2, vectors)
        gS: cute.Tensor,  # (PACKED / 4,)
        lane: Int32,
    ):
        """This lane's latents as bytes of a packed row, and the scales."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        words = cute.make_rmem_tensor(2, Uint32)
        halves = cute.make_tensor(values.iterator, cute.make_layout((4, 2)))
        for i in cutlass.range_constexpr(PASSES):
            values.store(held[None, i].load().to(Float32))
            amax = Float32(0)
            for v in cutlass.range_constexpr(VECTOR):
                amax = largest(amax, values[v])
            amax = cute.arch.warp_reduction_max(amax, threads_in_group=SHARING)
            scale, inverse = scale_and_inverse(amax)
            values.store(values.load() * inverse)
            for half in cutlass.range_constexpr(2):
                words[half] = e4m3x4(halves[None, half])
            cute.autovec_copy(words, gC[None, i * LANES + lane])
            if lane % SHARING == 0:
                gS[LATENT // 4 + i * (LANES // SHARING) + lane // SHARING] = scale


def vectors_of(pointer, vector, vectors):
    """(vector, vectors, rows) of rows side by side."""
    row = vector * vectors
    stride = cute.assume(Int64(row), divby=row)
    return cute.make_tensor(
        pointer, cute.make_layout((vector, vectors, 1), stride=(1, vector, stride))
    )
