"""Rounds of rerouting within a cluster: assignments beyond the capacity propose to other experts.

All thread blocks go through the same rounds, because they compute the same sums.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Uint32

from kernelcat.kernels.cute.moe_route import token_masks
from kernelcat.kernels.cute.moe_route.cluster_counts import ClusterCounts
from kernelcat.kernels.cute.moe_route.select_block import SelectBlock
from kernelcat.kernels.cute.moe_route.warp_select import chosen, value_of


class Rerouting:
    """From selected experts to the experts that are used finally. In shared memory are

        sServed     (max_experts,)  accepted assignments, of the whole cluster
        sRefused    (1,)            refused proposals of the last round, of the whole cluster
        sProposals  as sExperts     experts of this round's proposals; -1 for no proposal
    """

    def __init__(self, block: SelectBlock, counts: ClusterCounts):
        self.block, self.counts = block, counts

    def allocate(self, shared):
        """sServed, sRefused and sProposals."""
        slots = cute.make_layout(self.block.num_slots)
        return (
            shared.allocate_tensor(Int32, cute.make_layout(self.block.max_experts)),
            shared.allocate_tensor(Int32, cute.make_layout(1)),
            shared.allocate_tensor(Int16, slots),
        )

    @cute.jit
    def run(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (vector, experts / vector)
        memory: tuple,
        own_memory: tuple,
        sCounts: cute.Tensor,  # (max_experts / 2, cluster_size, 2)
        sTotals: cute.Tensor,  # (max_experts,), in the end of the experts that are used finally
        sEarlier: cute.Tensor,  # (max_experts,), as sTotals
        rank: Int32,
        first_token: Int32,
        num_tokens: Int32,
        scaling: Float32,
        capacity: Int32,
    ):
        """Reroutes. ``memory`` and ``own_memory`` are what ``allocate`` of the classes returned."""
        sMasks, sExperts, sWeights, sSigmoids = memory
        sServed, _, sProposals = own_memory
        tidx, threads = cute.arch.thread_idx()[0], self.block.threads
        num_slots = num_tokens * self.block.top_k
        for slot in cutlass.range(tidx, num_slots, threads, unroll=1):
            sProposals[slot] = sExperts[slot]
            sExperts[slot] = Int16(-1)
        for e in cutlass.range(tidx, self.block.max_experts, threads, unroll=1):
            sServed[e] = Int32(0)
        cute.arch.barrier()
        buffer = Int32(0)
        num_refused = self.accept(
            sMasks, sExperts, own_memory, sTotals, sEarlier, num_slots, capacity
        )
        while num_refused > 0:
            self.propose(
                mLogits, mCorrection, sMasks, sExperts, sSigmoids, sServed, sProposals, first_token,
                num_tokens, capacity,
            )  # fmt: skip
            buffer = 1 - buffer
            self.counts.add_up(sMasks, sCounts, sTotals, sEarlier, rank, buffer)
            num_refused = self.accept(
                sMasks, sExperts, own_memory, sTotals, sEarlier, num_slots, capacity
            )
        self.finish(mLogits, sMasks, sExperts, sWeights, first_token, num_tokens, scaling)
        self.counts.add_up(sMasks, sCounts, sTotals, sEarlier, rank, 1 - buffer)

    @cute.jit
    def accept(
        self,
        sMasks: cute.Tensor,  # (max_experts, words), cleared in the end
        sExperts: cute.Tensor,  # (slots,), written where a proposal is accepted
        own_memory: tuple,
        sTotals: cute.Tensor,  # (max_experts,)
        sEarlier: cute.Tensor,  # (max_experts,)
        num_slots: Int32,
        capacity: Int32,
    ):
        """Accepts proposals until experts are full; returns how many of the cluster are refused."""
        sServed, sRefused, sProposals = own_memory
        tidx, threads = cute.arch.thread_idx()[0], self.block.threads
        for slot in cutlass.range(tidx, num_slots, threads, unroll=1):
            expert = Int32(sProposals[slot])
            if expert >= 0:
                token = slot // self.block.top_k
                rank = sEarlier[expert] + token_masks.rank(sMasks, token, expert)
                if sServed[expert] + rank < capacity:
                    sExperts[slot] = Int16(expert)
        if tidx == 0:
            sRefused[0] = Int32(0)
        cute.arch.barrier()
        for e in cutlass.range(tidx, self.block.max_experts, threads, unroll=1):
            wanted = sServed[e] + sTotals[e]
            sServed[e] = cutlass.min(wanted, capacity)
            if wanted > capacity:
                cute.arch.atomic_add(sRefused.iterator, wanted - capacity)
        token_masks.clear(sMasks, threads)
        cute.arch.barrier()
        return sRefused[0]

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
        capacity: Int32,
    ):
        """The unplaced slots of each token propose to its best experts that have room."""
        lane, top_k = cute.arch.lane_idx(), self.block.top_k
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
        scaling: Float32,
    ):
        """Masks and weights of the experts that are used finally."""
        lane, top_k = cute.arch.lane_idx(), self.block.top_k
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
