"""Rounds of rerouting within a cluster, for experts that are selected from sorted lists."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Uint32

from kernelcat.kernels.cute.moe_route import token_masks
from kernelcat.kernels.cute.moe_route.rerouting import Rerouting
from kernelcat.kernels.cute.moe_route.sorted_select import chosen, value_of


class SortedRerouting(Rerouting):
    """Rerouting with a `SortedBlock`, in which ``top_k`` and groups are compiled in.

    So ``groups`` of the calls is empty.
    """

    @cute.jit
    def propose(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (vector, experts / vector)
        sMasks: cute.Tensor,  # (max_experts, words), written
        sExperts: cute.Tensor,  # (slots,)
        sSigmoids: cute.Tensor,  # (vector, experts / vector, warps)
        sServed: cute.Tensor,  # (max_experts,)
        sProposals: cute.Tensor,  # (slots,), written
        first_token: Int32,
        num_tokens: Int32,
        top_k: int,
        groups: tuple,
        capacity: Int32,
    ):
        """The unplaced slots of each token propose to its best experts that have room."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw, logits, corrections, keys, tails = self.block.registers(mLogits)
        self.block.load_corrections(mCorrection, corrections)
        for token in cutlass.range(warp, num_tokens, self.block.warps, unroll=1):
            first_slot, used = token * top_k, Int32(0)
            if lane < top_k:
                used = Int32(sExperts[first_slot + lane])
                sProposals[first_slot + lane] = Int16(-1)
            cute.arch.sync_warp()
            unplaced = Uint32(cute.arch.vote_ballot_sync(used < 0))
            if unplaced > Uint32(0):
                self.block.load(mLogits[None, None, first_token + token], raw)
                self.block.widen(raw, logits)
                self.block.make_candidates(
                    logits, corrections, sSigmoids[None, None, warp], keys, tails
                )
                self.close_full(sServed, keys, tails, capacity)
                for slot in cutlass.range(top_k, unroll=1):
                    self.block.remove(keys, tails, cute.arch.shuffle_sync(used, slot))
                self.block.sort(keys, tails)
                for slot in cutlass.range(top_k, unroll=1):
                    if (unplaced >> Uint32(slot)) & Uint32(1) == Uint32(1):
                        key, is_mine, expert = self.block.take_best(keys, tails)
                        if is_mine & (key > Uint32(0)):
                            sProposals[first_slot + slot] = Int16(expert)
                            token_masks.add(sMasks, token, expert)

    @cute.jit
    def close_full(
        self,
        sServed: cute.Tensor,  # (max_experts,)
        keys: cute.Tensor,  # (per_lane,), changed
        tails: cute.Tensor,  # (per_lane,)
        capacity: Int32,
    ):
        """Takes out experts without room, and for softmax those with a logit of -inf."""
        for i in cutlass.range_constexpr(self.block.per_lane):
            expert = chosen(keys[i] > Uint32(0), Int32(~tails[i]), Int32(0))
            is_open = sServed[expert] < capacity
            if cutlass.const_expr(self.block.score.is_softmax):
                is_open = is_open & (value_of(keys[i]) > -Float32.inf)
            keys[i] = chosen(is_open, keys[i], Uint32(0))

    @cute.jit
    def finish(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        sMasks: cute.Tensor,  # (max_experts, words), written
        sExperts: cute.Tensor,  # (slots,)
        sWeights: cute.Tensor,  # (slots,), written
        first_token: Int32,
        num_tokens: Int32,
        top_k: int,
        scaling: Float32,
    ):
        """Masks and weights of the experts that are used finally."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw, logits, _, _, _ = self.block.registers(mLogits)
        for token in cutlass.range(warp, num_tokens, self.block.warps, unroll=1):
            row, slot, expert = first_token + token, token * top_k + lane, Int32(-1)
            if lane < top_k:
                expert = Int32(sExperts[slot])
            self.block.load(mLogits[None, None, row], raw)
            self.block.widen(raw, logits)
            max_logit = self.block.max_of(logits)
            numerator = self.block.stored_numerator(mLogits, row, expert, max_logit)
            weight = self.block.weigh(logits, numerator, max_logit, scaling)
            if lane < top_k:
                if expert >= 0:
                    token_masks.add(sMasks, token, expert)
                sWeights[slot] = weight
