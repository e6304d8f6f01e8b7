"""The plain latent attention: one warp for one query of one head, one token after another."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.float8 import to_float
from kernelcat.kernels.cute.common.online_softmax import LOWEST, exp2, finish, logit
from kernelcat.kernels.cute.common.token_slots import sequence_of
from kernelcat.reference._mla_row import LATENT, PACKED, ROW, SCALED

WARPS = 4
LANES = 32


class Naive:
    """Serves any shape. A lane holds every 32nd element of its warp's query."""

    def __init__(self, dtype: str, packed: bool, page_size: int):
        self.dtype, self.packed, self.page_size = element_type(dtype), packed, page_size

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,  # (tokens, heads, ROW)
        kv_cache: cute.Pointer,  # (pages, page_size, ROW), or PACKED bytes
        block_table: cute.Pointer,  # (batch, table_width)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        out: cute.Pointer,  # (tokens, heads, LATENT)
        lse: cute.Pointer,  # (tokens, heads)
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        pages: Int32,
        table_width: Int32,
        sm_scale: Float32,
        stream: cuda.CUstream,
    ):
        q_layout = cute.make_layout((ROW, heads, tokens), stride=(1, ROW, Int64(heads) * ROW))
        result_layout = cute.make_layout(
            (LATENT, heads, tokens), stride=(1, LATENT, Int64(heads) * LATENT)
        )
        table = cute.make_layout((table_width, batch), stride=(1, Int64(table_width)))
        row = PACKED if self.packed else ROW
        mC = cute.make_tensor(kv_cache, cute.make_layout((row, 1), stride=(1, Int64(row))))
        mS, mR = mC, mC
        if cutlass.const_expr(self.packed):
            scales, rope = PACKED // 4, PACKED // 2
            mS = cute.make_tensor(
                cute.recast_ptr(kv_cache, dtype=Float32),
                cute.make_layout((scales, 1), stride=(1, Int64(scales))),
            )
            mR = cute.make_tensor(
                cute.recast_ptr(kv_cache, dtype=BFloat16),
                cute.make_layout((rope, 1), stride=(1, Int64(rope))),
            )
        self.kernel(
            cute.make_tensor(q, q_layout),
            mC,
            mS,
            mR,
            cute.make_tensor(block_table, table),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(out, result_layout),
            cute.make_tensor(lse, cute.make_layout((heads, tokens), stride=(1, Int64(heads)))),
            sm_scale,
        ).launch(
            grid=(tokens, cute.ceil_div(heads, WARPS), 1), block=(LANES, WARPS, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # (ROW, heads, tokens)
        mC: cute.Tensor,  # (ROW or PACKED, slots)
        mS: cute.Tensor,  # (PACKED / 4, slots): mC as float32
        mR: cute.Tensor,  # (PACKED / 2, slots): mC as bfloat16
        mTable: cute.Tensor,  # (table_width, batch)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mO: cute.Tensor,  # (LATENT, heads, tokens)
        mL: cute.Tensor,  # (heads, tokens)
        sm_scale: Float32,
    ):
        lane, warp, _ = cute.arch.thread_idx()
        token, block, _ = cute.arch.block_idx()
        head = block * WARPS + warp
        if head < mQ.shape[1]:
            seq = sequence_of(token, mStarts, mTable.shape[1])
            position = mLens[seq] - (mStarts[seq + 1] - token)
            query = cute.make_rmem_tensor(ROW // LANES, Float32)
            value = cute.make_rmem_tensor(LATENT // LANES, Float32)
            value.fill(0.0)
            for i in cutlass.range_constexpr(ROW // LANES):
                query[i] = Float32(mQ[i * LANES + lane, head, token])
            row_max, row_sum = Float32(LOWEST), Float32(0)
            row = cute.make_rmem_tensor(ROW // LANES, Float32)
            for t in cutlass.range(position + 1, unroll=1):
                page = mTable[t // self.page_size, seq]
                slot = Int64(page) * self.page_size + t % self.page_size
                self.load(mC[None, slot], mS[None, slot], mR[None, slot], lane, row)
                score = Float32(0)
                for i in cutlass.range_constexpr(ROW // LANES):
                    score += query[i] * row[i]
                score = cute.arch.warp_reduction_sum(score)
                z = logit(score, sm_scale, Float32(0), False)
                old_max = row_max
                row_max = cute.arch.fmax(row_max, z)
                rescale, p = exp2(old_max - row_max), exp2(z - row_max)
                row_sum = row_sum * rescale + p
                for i in cutlass.range_constexpr(LATENT // LANES):
                    value[i] = value[i] * rescale + p * row[i]

            factor, lse = finish(row_max, row_sum, Float32(0), False)
            for i in cutlass.range_constexpr(LATENT // LANES):
                mO[i * LANES + lane, head, token] = (value[i] * factor).to(self.dtype)
            if lane == 0:
                mL[head, token] = lse

    @cute.jit
    def load(
        self,
        gC: cute.Tensor,  # (ROW or PACKED,)
        gS: cute.Tensor,  # (PACKED / 4,)
        gR: cute.Tensor,  # (PACKED / 2,)
        lane: Int32,
        row: cute.Tensor,  # (ROW / LANES,), written
    ):
        """Loads this lane's elements of a token as float32."""
        for i in cutlass.range_constexpr(ROW // LANES):
            first = i * LANES
            if cutlass.const_expr(not self.packed):
                row[i] = Float32(gC[first + lane])
            elif cutlass.const_expr(first < LATENT):
                row[i] = to_float(gC[first + lane]) * gS[LATENT // 4 + first // SCALED]
            else:
                row[i] = Float32(gR[(PACKED // 2 - ROW) + first + lane])
