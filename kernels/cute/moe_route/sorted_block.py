"""One thread block selects the experts of a block of tokens, one warp for each token at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, Uint32

from kernelcat.kernels.cute.moe_route import token_masks
from kernelcat.kernels.cute.moe_route.sorted_select import SortedSelect, chosen, value_of
from kernelcat.kernels.cute.moe_route.warp_select import LANES


class SortedBlock(SortedSelect):
    """``block_tokens`` tokens, which ``warps`` warps take in turns.

    In shared memory are

        sMasks    (max_experts, words)    bits of the tokens that use an expert
        sExperts  (block_tokens * top_k,) experts of the assignments
        sWeights  (block_tokens * top_k,) their weights
        sSigmoids (vector, experts / vector, warps) sigmoids of each warp's token; not for softmax
    """

    def __init__(
        self, warps: int, block_tokens: int, max_experts: int, **rule: int | str | bool
    ):
        super().__init__(**rule)
        self.warps, self.block_tokens, self.max_experts = warps, block_tokens, max_experts
        self.threads, self.num_slots = LANES * warps, block_tokens * self.top_k

    def allocate(self, shared):
        """sMasks, sExperts, sWeights and sSigmoids."""
        masks = token_masks.masks_layout(self.block_tokens, self.max_experts)
        slots, size = cute.make_layout(self.num_slots), self.word_vector
        num_vectors = 1 if self.score.is_softmax else self.experts // size
        vectors = cute.make_layout((size, num_vectors, self.warps))
        return (
            shared.allocate_tensor(Uint32, masks),
            shared.allocate_tensor(Int16, slots),
            shared.allocate_tensor(Float32, slots),
            shared.allocate_tensor(Float32, vectors, byte_alignment=16),
        )

    @cute.jit
    def clear(self, memory: tuple):
        """Gets ``memory``, which ``allocate`` returned, ready for `select`; for all threads."""
        token_masks.clear(memory[0], self.threads)
        cute.arch.barrier()

    @cute.jit
    def vectors_of(self, logits: cute.Pointer, tokens: Int32):
        """(vector, experts / vector, tokens); experts are a multiple of ``vector``."""
        shape = (self.vector, self.experts // self.vector, tokens)
        row = cute.assume(Int64(self.experts), divby=self.vector)
        return cute.make_tensor(logits, cute.make_layout(shape, stride=(1, self.vector, row)))

    @cute.jit
    def corrections_of(self, correction: cute.Pointer):
        """(vector, experts / vector), of vectors of at most 16 bytes."""
        size = self.word_vector
        return cute.make_tensor(correction, cute.make_layout((size, self.experts // size)))

    def registers(self, mLogits: cute.Tensor):
        """Logits as loaded and as float32, corrections, keys and tails of a lane."""
        vectors, size = (self.vector, self.per_lane // self.vector), self.word_vector
        return (
            cute.make_rmem_tensor(vectors, mLogits.element_type),
            cute.make_rmem_tensor(self.per_lane, Float32),
            cute.make_rmem_tensor((size, self.per_lane // size), Float32),
            cute.make_rmem_tensor(self.per_lane, Uint32),
            cute.make_rmem_tensor(self.per_lane, Uint32),
        )

    @cute.jit
    def load_corrections(
        self,
        mCorrection: cute.Tensor,  # (vector, experts / vector)
        corrections: cute.Tensor,  # (vector, per_lane / vector), written
    ):
        """Starts to load the corrections of the lane's experts; 0 where there are none."""
        corrections.fill(0)
        if cutlass.const_expr(self.score.correction):
            self.load(mCorrection, corrections)

    @cute.jit
    def select(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (vector, experts / vector)
        memory: tuple,
        first_token: Int32,
        num_tokens: Int32,  # of the thread block
        scaling: Float32,
    ):
        """Selects experts: writes masks, experts and weights to shared memory.

        `clear` comes before it, and a barrier of the thread block must follow it.
        """
        sMasks, sExperts, sWeights, sSigmoids = memory
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        raw, logits, corrections, keys, tails = self.registers(mLogits)
        if warp < num_tokens:
            self.load(mLogits[None, None, first_token + warp], raw)
        self.load_corrections(mCorrection, corrections)
        for token in cutlass.range(warp, num_tokens, self.warps, unroll=1):
            first_slot = token * self.top_k
            self.widen(raw, logits)
            if token + self.warps < num_tokens:
                self.load(mLogits[None, None, first_token + token + self.warps], raw)
            self.make_candidates(
                logits, corrections, sSigmoids[None, None, warp], keys, tails
            )
            key, max_key = Uint32(0), Uint32(0)
            for slot in cutlass.range_constexpr(self.top_k):
                best, is_mine, head = self.take_best(keys, tails)
                if is_mine:
                    sExperts[first_slot + slot] = Int16(head)
                key = chosen(lane == slot, best, key)
                if cutlass.const_expr(slot == 0):
                    max_key = best
            cute.arch.sync_warp()
            numerator, max_logit = Float32(0), value_of(max_key)
            if lane < self.top_k:
                expert = Int32(sExperts[first_slot + lane])
                token_masks.add(sMasks, token, expert)
                if cutlass.const_expr(self.score.is_softmax):
                    numerator = self.score.of_weight(value_of(key), max_logit)
                else:
                    size = self.word_vector
                    numerator = sSigmoids[expert % size, expert // size, warp]
            weight = self.weigh(logits, numerator, max_logit, scaling)
            if lane < self.top_k:
                sWeights[first_slot + lane] = weight
            if cutlass.const_expr(not self.score.is_softmax):
                cute.arch.sync_warp()  # the next token's sigmoids take the place of these

    @cute.jit
    def stored_numerator(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        row: Int32,
        expert: Int32,  # -1 for none
        max_logit: Float32,
    ):
        """The numerator of the weight of the lane's expert, 0 where it has none."""
        numerator = Float32(0)
        if expert >= 0:
            logit = Float32(mLogits[expert % self.vector, expert // self.vector, row])
            numerator = self.score.of_weight(logit, max_logit)
        return numerator
