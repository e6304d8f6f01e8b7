"""Merges the partial results of a row; each thread merges one vector.

Where rows are few, several groups of threads split the partial results of a row, and merge theirs
in shared memory. By programmatic dependent launch (Hopper) the kernel starts while the kernel that
it waits for still runs. The length of the sequence tells which thread blocks had tokens, so no
counter is needed, and no workspace that is zero.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from kernelcat.jit.cute import element_type
from kernelcat.kernels.cute.common.online_softmax import finish
from kernelcat.kernels.cute.common.partials import VECTOR, Partials
from kernelcat.kernels.cute.common.token_slots import sequence_of
from kernelcat.kernels.cute.flashmla.layouts import out_layout, used_splits
from kernelcat.reference._mla_row import LATENT

VECTORS = LATENT // VECTOR
UNROLL = 8
"""Partial results that a thread loads at once."""


class Combine:
    """Partial results of tiles of ``block_m`` rows, from splits of tiles of ``block_n`` tokens."""

    def __init__(self, dtype: str, block_m: int, block_n: int, groups: int, programmatic: bool):
        self.dtype, self.block_m, self.block_n = element_type(dtype), block_m, block_n
        self.groups, self.programmatic = groups, programmatic
        self.partials = Partials(self.dtype, LATENT, block_m, 2, 1, VECTORS, False, "none")

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
            cute.make_tensor(partial, self.partials.partial_layout(batch * row_tiles, num_splits)),
            cute.make_tensor(kv_lens, cute.make_layout(batch)),
            cute.make_tensor(cu_q, cute.make_layout(batch + 1)),
            cute.make_tensor(out, out_layout(VECTOR, rows)),
            cute.make_tensor(lse, cute.make_layout(rows)),
            heads,
            row_tiles,
            num_splits,
        ).launch(
            grid=(heads, tokens, 1),
            block=(VECTORS, self.groups, 1),
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
        vector, group, _ = cute.arch.thread_idx()
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
            row_max, row_sum = self.merge(gPartial, vector, group, used, values)
            if cutlass.const_expr(self.groups > 1):
                row_max, row_sum = self.merge_groups(values, row_max, row_sum, vector, group)
            if group == 0:
                factor, lse = finish(row_max, row_sum, Float32(0), False)
                rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
                rounded.store((values.load() * factor).to(self.dtype))
                cute.autovec_copy(rounded, mO[None, vector, token * heads + head])
                if vector == 0:
                    mL[token * heads + head] = lse

    @cute.jit
    def merge(
        self,
        gPartial: cute.Tensor,  # (VECTOR, VECTORS + 1, num_splits)
        vector: Int32,
        group: Int32,
        used: Int32,
        values: cute.Tensor,  # (VECTOR,), written
    ):
        """Merges a vector of every ``groups``-th partial result; returns row max and row sum."""
        gPartial = cute.domain_offset((0, 0, group), gPartial)
        group_layout = cute.make_layout(
            (VECTOR, VECTORS + 1, used), stride=(1, VECTOR, self.groups * gPartial.stride[2])
        )
        parts = cute.make_tensor(gPartial.iterator, group_layout)
        return self.partials.merge(
            parts[None, vector, None], parts[None, VECTORS, None],
            cute.ceil_div(cutlass.max(used - group, 0), self.groups), values, UNROLL,
        )  # fmt: skip

    @cute.jit
    def merge_groups(
        self,
        values: cute.Tensor,  # (VECTOR,), overwritten
        row_max: Float32,
        row_sum: Float32,
        vector: Int32,
        group: Int32,
    ):
        """Merges the vectors of all groups; returns row max and row sum."""
        shared = SmemAllocator()
        layout = cute.make_layout((VECTOR, VECTORS + 1, self.groups))
        sParts = shared.allocate_tensor(Float32, layout, 16)
        cute.autovec_copy(values, sParts[None, vector, group])
        if vector == 0:
            sParts[0, VECTORS, group], sParts[1, VECTORS, group] = row_max, row_sum
        cute.arch.barrier()
        return self.partials.merge(
            sParts[None, vector, None], sParts[None, VECTORS, None], Int32(self.groups), values,
            self.groups,
        )  # fmt: skip
