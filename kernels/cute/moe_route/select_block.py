"""One thread block selects the experts of a block of tokens, one warp for each token at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, Uint32

from kernelcat.kernels.cute.moe_route import token_masks
from kernelcat.kernels.cute.moe_route.warp_select import LANES, WarpSelect, value_of

MAX_TOP_K = 16


class SelectBlock(WarpSelect):
    """``block_tokens`` tokens, which ``warps`` warps take in turns.

    In shared memory are

        sMasks    (max_experts, words)       bits of the tokens that use an expert
        sExperts  (slots,)                   experts of the assignments
        sWeights  (slots,)                   their weights
        sScores   (max_experts, warps)       selection scores, where groups are limited
    """

    def __init__(self, warps: int, block_tokens: int, **rule: int | str | bool):
        super().__init__(**rule)
        self.warps, self.block_tokens = warps, block_tokens
        self.threads = LANES * warps

    def allocate(self, shared):
        """sMasks, sExperts, sWeights and sScores."""
        masks = token_masks.masks_layout(self.block_tokens, self.max_experts)
        slots = cute.make_layout(self.block_tokens * MAX_TOP_K)
        scores = cute.make_layout((self.max_experts if self.limited else 1, self.warps))
        return (
            shared.allocate_tensor(Uint32, masks),
            shared.allocate_tensor(Int16, slots),
            shared.allocate_tensor(Float32, slots),
            shared.allocate_tensor(Float32, scores),
        )

    @cute.jit
    def vectors_of(self, logits: cute.Pointer, tokens: Int32, experts: Int32):
        """(vector, experts / vector, tokens); experts are a multiple of ``vector``."""
        stride = cute.assume(Int64(experts), divby=self.vector)
        shape = (self.vector, experts // self.vector, tokens)
        return cute.make_tensor(logits, cute.make_layout(shape, stride=(1, self.vector, stride)))

    def registers(self, mLogits: cute.Tensor):
        """Logits as loaded and as float32, corrections, bits of groups, and keys of a lane."""
        vectors = self.vector, self.per_lane // self.vector
        kinds = (Float32, Float32, Uint32, Uint32)
        return (
            cute.make_rmem_tensor(vectors, mLogits.element_type),
            *(cute.make_rmem_tensor(self.per_lane, kind) for kind in kinds),
        )

    @cute.jit
    def select(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (experts,)
        memory: tuple,
        first_token: Int32,
        num_tokens: Int32,  # of the thread block
        top_k: Int32,
        groups: tuple,
        scaling: Float32,
    ):
        """Selects experts: writes masks, experts and weights to shared memory.

        All threads of the thread block call this; a barrier must precede the use of ``memory``.
        """
        sMasks, sExperts, sWeights, sScores = memory
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, experts = cute.arch.lane_idx(), cute.size(mCorrection)
        token_masks.clear(sMasks, self.threads)
        raw, logits, corrections, group_bits, keys = self.registers(mLogits)
        if warp < num_tokens:
            self.load(mLogits[None, None, first_token + warp], raw)
        group_size, top_groups, group_lanes = groups
        self.load_rule(mCorrection, corrections, group_bits, experts, group_size, group_lanes)
        cute.arch.barrier()
        for token in cutlass.range(warp, num_tokens, self.warps, unroll=1):
            row = first_token + token
            self.widen(raw, logits, experts)
            if token + self.warps < num_tokens:
                self.load(mLogits[None, None, row + self.warps], raw)
            self.make_keys(
                logits, corrections, group_bits, sScores[None, warp], keys, experts, group_size,
                top_groups, group_lanes,
            )  # fmt: skip
            expert, key = Int32(-1), Uint32(0)
            for slot in cutlass.range(top_k, unroll=1):
                best_expert, best_key = self.take_best(keys)
                if lane == slot:
                    expert, key = best_expert, best_key
            logit = self.logit_of(mLogits, row, expert, key)
            max_logit = cute.arch.shuffle_sync(logit, 0)
            weight = self.weigh(logits, expert, logit, max_logit, scaling)
            if lane < top_k:
                slot = token * top_k + lane
                sExperts[slot], sWeights[slot] = Int16(expert), weight
                token_masks.add(sMasks, token, expert)

    @cute.jit
    def logit_of(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        row: Int32,
        expert: Int32,  # -1 for none
        key: Uint32,
    ):
        """The logit of the lane's expert, whose key is ``key``; for softmax, the key tells it."""
        logit = -Float32.inf
        if cutlass.const_expr(self.score.is_softmax):
            if expert >= 0:
                logit = value_of(key)
        else:
            logit = self.stored_logit(mLogits, row, expert)
        return logit

    @cute.jit
    def stored_logit(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        row: Int32,
        expert: Int32,  # -1 for none
    ):
        """The logit of the lane's expert from memory, -inf where the lane has none."""
        logit = -Float32.inf
        if expert >= 0:
            logit = Float32(mLogits[expert % self.vector, expert // self.vector, row])
        return logit
