"""The ids of all ranks' tokens, as they arrive, and the numbers of the tokens that come."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelcat.kernels.cute.common.windows import (
    begin_epoch,
    flagged_words_of,
    load_flagged,
    report,
)

LANES = 32
"""Tokens of a chunk: a lane has a token."""


class Arrive:
    """A warp for each chunk of a rank's tokens."""

    def __init__(self, ranks: int, top_k: int, programmatic: bool):
        self.ranks, self.top_k, self.programmatic = ranks, top_k, programmatic

    @cute.jit
    def __call__(
        self,
        ids: cute.Pointer,  # (ranks * tokens, top_k) int32
        numbers: cute.Pointer,  # (ranks * tokens,) int32
        counts: cute.Pointer,  # (ranks * chunks,) int32
        tokens: Int32,
        chunks: Int32,
        local_experts: Int32,
        rank: Int32,
        window0: Int64,
        window1: Int64,
        window2: Int64,
        window3: Int64,
        window4: Int64,
        window5: Int64,
        window6: Int64,
        window7: Int64,
        stream: cuda.CUstream,
    ):
        rows = self.ranks * tokens
        pairs = cute.make_layout((self.top_k, rows), stride=(1, self.top_k))
        self.kernel(
            cute.make_tensor(ids, pairs),
            cute.make_tensor(numbers, cute.make_layout(rows)),
            cute.make_tensor(counts, cute.make_layout(self.ranks * chunks)),
            tokens, chunks, local_experts, rank, window0,
        ).launch(
            grid=(self.ranks * chunks, 1, 1), block=(LANES, 1, 1), stream=stream,
            use_pdl=self.programmatic,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mAll: cute.Tensor,  # (top_k, ranks * tokens): ids
        mNumbers: cute.Tensor,  # which of the chunk's tokens that come a token is; -1 for none
        mCounts: cute.Tensor,  # (ranks * chunks,): tokens that come
        tokens: Int32,
        chunks: Int32,
        local_experts: Int32,
        rank: Int32,
        window0: Int64,
    ):
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        lane, chunk = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        source, token = chunk // chunks, chunk % chunks * LANES + lane
        epoch, tries = begin_epoch(window0, Int32(0))
        experts = cute.make_rmem_tensor(self.top_k, Int32)
        comes = Int32(0)
        if token < tokens:
            words = flagged_words_of(window0, epoch, source) + 8 * (1 + Int64(token) * self.top_k)
            left = tries
            missing = self.load(words, epoch, experts)
            while missing != 0 and left > 0:
                missing = self.load(words, epoch, experts)
                left -= 1
            report(window0, missing, tries, left, source)
            for k in cutlass.range_constexpr(self.top_k):
                mAll[k, source * tokens + token] = experts[k]
                if experts[k] >= 0 and experts[k] // local_experts == rank:
                    comes = Int32(1)
        ballot = Uint32(cute.arch.vote_ballot_sync(comes == 1))
        earlier = ballot & ((Uint32(1) << Uint32(lane)) - Uint32(1))
        if token < tokens:
            number = Int32(-1)
            if comes == 1:
                number = Int32(cute.arch.popc(earlier))
            mNumbers[source * tokens + token] = number
        if lane == 0:
            mCounts[chunk] = Int32(cute.arch.popc(ballot))

    @cute.jit
    def load(
        self,
        words: Int64,
        epoch: Uint32,
        experts: cute.Tensor,  # (top_k,), written
    ):
        """Loads the ids of a token; returns 1 unless all have arrived."""
        missing = Int32(0)
        for k in cutlass.range_constexpr(self.top_k):
            expert, flag = load_flagged(words + 8 * k)
            experts[k] = Int32(expert)
            if flag != epoch:
                missing = Int32(1)
        return missing
