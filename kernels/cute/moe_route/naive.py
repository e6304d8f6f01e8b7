"""Routing without tricks, in three kernels: logits, the selection, and places (`naive_place`)."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelcat.kernels.cute.moe_route.router import THREADS, Router, rank_of, rows_of

LOGIT_THREADS = 128


class Logits:
    """logits = x @ router^T + router_bias, one thread for each logit."""

    def __init__(self, router_bias: bool):
        self.router_bias = router_bias

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (tokens, hidden)
        router: cute.Pointer,  # (experts, hidden)
        router_bias: cute.Pointer,  # (experts,)
        logits: cute.Pointer,  # (tokens, experts) float32
        tokens: Int32,
        experts: Int32,
        hidden: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            rows_of(x, hidden, tokens),
            rows_of(router, hidden, experts),
            cute.make_tensor(router_bias, cute.make_layout(experts)),
            rows_of(logits, experts, tokens),
        ).launch(
            grid=(tokens, cute.ceil_div(experts, LOGIT_THREADS), 1),
            block=(LOGIT_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,  # (hidden, tokens)
        mRouter: cute.Tensor,  # (hidden, experts)
        mBias: cute.Tensor,  # (experts,)
        mLogits: cute.Tensor,  # (experts, tokens)
    ):
        token, block, _ = cute.arch.block_idx()
        expert = block * LOGIT_THREADS + cute.arch.thread_idx()[0]
        if expert < mLogits.shape[0]:
            logit = Float32(0)
            for k in cutlass.range(mX.shape[0], unroll=1):
                logit += Float32(mX[k, token]) * Float32(mRouter[k, expert])
            if cutlass.const_expr(self.router_bias):
                logit += Float32(mBias[expert])
            mLogits[expert, token] = logit


class Select(Router):
    """Experts and weights before the capacity limit, a thread block for each token."""

    @cute.jit
    def __call__(
        self,
        logits: cute.Pointer,  # (tokens, experts)
        correction: cute.Pointer,  # (experts,) float32
        expert_ids: cute.Pointer,  # (tokens, top_k) int32
        weights: cute.Pointer,  # (tokens, top_k) float32
        tokens: Int32,
        experts: Int32,
        top_k: Int32,
        group_size: Int32,
        top_groups: Int32,
        scaling: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            rows_of(logits, experts, tokens),
            cute.make_tensor(correction, cute.make_layout(experts)),
            rows_of(expert_ids, top_k, tokens),
            rows_of(weights, top_k, tokens),
            group_size,
            top_groups,
            scaling,
        ).launch(grid=(tokens, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mLogits: cute.Tensor,  # (experts, tokens)
        mCorrection: cute.Tensor,  # (experts,)
        mIds: cute.Tensor,  # (top_k, tokens)
        mWeights: cute.Tensor,  # (top_k, tokens)
        group_size: Int32,
        top_groups: Int32,
        scaling: Float32,
    ):
        expert, token = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        experts, top_k = mLogits.shape[0], mIds.shape[0]
        sLogits, sScores, sExperts = self.allocate()
        self.load(mLogits[None, token], mCorrection, sLogits, sScores, group_size, top_groups)
        if expert < experts:
            rank = rank_of(sScores, expert, experts)
            if rank < top_k:
                sExperts[rank] = expert
                mIds[rank, token] = expert
        cute.arch.barrier()
        self.weigh(sLogits, sExperts, mWeights[None, token], experts, scaling)
