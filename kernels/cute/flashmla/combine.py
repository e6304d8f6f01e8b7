"""Adding up what the CTAs of a row found: 128 threads a row, a vector each.

It is launched beside the kernel it waits for, by programmatic dependent launch (Hopper). Which CTAs
had tokens follows from the sequence's length, so nothing is counted and nothing needs to be zero.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.flashmla.place import LATENT, out_layout, used_splits
from kernelcat.kernels.cute.kv_write.place import sequence_of
from kernelcat.kernels.cute.paged_attn.merge import VECTOR, Merge
from kernelcat.kernels.cute.paged_attn.softmax import finish

UNROLL = 8
"""Parts that a thread asks for at once."""


class Combine:
    """Of tiles of ``block_m`` rows, whose CTAs had tiles of ``block_n`` tokens in turn."""

    def __init__(self, dtype: str, block_m: int, block_n: int, programmatic: bool):
        self.dtype, self.block_m, self.block_n = element_type(dtype), block_m, block_n
        self.programmatic = programmatic
        self.merge = Merge(self.dtype, LATENT, block_m, 2, 1, LATENT // VECTOR, False, "none")

    @cute.jit
    def __call__(
        self,
        partial: cute.Pointer,  # (batch, row_tiles, num_splits, block_m, LATENT + 4)
        kv_lens: cute.Pointer,  # (batch,)
        cu_q: cute.Pointer,  # (batch + 1,)
        out: cute.Pointer,  # (tokens, heads, LATENT)
        lse: cute.Pointer,  # (tokens, heads)
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        row_tiles: Int32,
        num_splits: Int32,
        stream: cuda.CUstream,
    ):
        rows = tokens * heads
        self.kernel(
            cute.make_tensor(partial, self.merge.partial_layout(batch * row_tiles, num_splits)),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(out, out_layout(VECTOR, rows)),
            cute.make_tensor(lse, cute.make_layout(rows)),
            heads,
            row_tiles,
            num_splits,
        ).launch(
            grid=(heads, tokens, 1),
            block=(LATENT // VECTOR, 1, 1),
            use_pdl=self.programmatic,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mPartial: cute.Tensor,  # (VECTOR, vectors + 1, block_m, num_splits, batch * row_tiles)
        mLens: cute.Tensor,  # (batch,)
        mStarts: cute.Tensor,  # (batch + 1,)
        mO: cute.Tensor,  # (VECTOR, vectors, tokens * heads)
        mL: cute.Tensor,  # (tokens * heads,)
        heads: Int32,
        row_tiles: Int32,
        num_splits: Int32,
    ):
        vector, _, _ = cute.arch.thread_idx()
        head, token, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        seq = sequence_of(token, mStarts, cute.size(mLens))
        used = used_splits(mLens[seq], self.block_n, num_splits)
        if used > 1:
            row = (token - mStarts[seq]) * heads + head
            tile = seq * row_tiles + row // self.block_m
            gPartial = mPartial[None, None, row % self.block_m, None, tile]
            values = cute.make_rmem_tensor(VECTOR, Float32)
            most, total = self.merge.gather(
                gPartial[None, vector, None], gPartial[None, self.merge.vectors, None], used,
                values, UNROLL,
            )  # fmt: skip
            factor, lse = finish(most, total, Float32(0), False)
            rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
            rounded.store((values.load() * factor).to(self.dtype))
            cute.autovec_copy(rounded, mO[None, vector, token * heads + head])
            if vector == 0:
                mL[token * heads + head] = lse
