"""Rounds of rerouting within a cluster: assignments beyond the capacity propose to other experts.

All thread blocks go through the same rounds, because they compute the same sums.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Uint32

from kernelcat.kernels.cute.moe_route import token_masks
from kernelcat.kernels.cute.moe_route.cluster_counts import ClusterCounts
from kernelcat.kernels.cute.moe_route.select_block import MAX_TOP_K, SelectBlock


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
        slots = cute.make_layout(self.block.block_tokens * MAX_TOP_K)
        return (
            shared.allocate_tensor(Int32, cute.make_layout(self.block.max_experts)),
            shared.allocate_tensor(Int32, cute.make_layout(1)),
            shared.allocate_tensor(Int16, slots),
        )

    @cute.jit
    def run(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        mCorrection: cute.Tensor,  # (experts,)
        memory: tuple,
        own_memory: tuple,
        sCounts: cute.Tensor,  # (max_experts / 2, cluster_size, 2)
        sTotals: cute.Tensor,  # (max_experts,), in the end of the experts that are used finally
        sEarlier: cute.Tensor,  # (max_experts,), as sTotals
        rank: Int32,
        first_token: Int32,
        num_tokens: Int32,
        top_k: Int32,
        groups: tuple,
        scaling: Float32,
        capacity: Int32,
    ):
        """Reroutes. ``memory`` and ``own_memory`` are what ``allocate`` of the classes returned."""
        sMasks, sExperts, sWeights, sScores = memory
        sServed, _, sProposals = own_memory
        tidx, threads, num_slots = cute.arch.thread_idx()[0], self.block.threads, num_tokens * top_k
        for slot in cutlass.range(tidx, num_slots, threads, unroll=1):
            sProposals[slot] = sExperts[slot]
            sExperts[slot] = Int16(-1)
        for e in cutlass.range(tidx, self.block.max_experts, threads, unroll=1):
            sServed[e] = Int32(0)
        cute.arch.barrier()
        buffer = Int32(0)
        num_refused = self.accept(
            sMasks, sExperts, own_memory, sTotals, sEarlier, num_slots, top_k, capacity
        )
        while num_refused > 0:
            self.propose(
                mLogits, mCorrection, sMasks, sExperts, sScores, sServed, sProposals, first_token,
                num_tokens, top_k, groups, capacity,
            )  # fmt: skip
            buffer = 1 - buffer
            self.counts.add_up(sMasks, sCounts, sTotals, sEarlier, rank, buffer)
            num_refused = self.accept(
                sMasks, sExperts, own_memory, sTotals, sEarlier, num_slots, top_k, capacity
            )
        self.finish(
            mLogits, sMasks, sExperts, sWeights, first_token, num_tokens, top_k, scaling
        )
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
        top_k: Int32,
        capacity: Int32,
    ):
        """Accepts proposals until experts are full; returns how many of the cluster are refused."""
        sServed, sRefused, sProposals = own_memory
        tidx, threads = cute.arch.thread_idx()[0], self.block.threads
        for slot in cutlass.range(tidx, num_slots, threads, unroll=1):
            expert = Int32(sProposals[slot])
            if expert >= 0:
                rank = sEarlier[expert] + token_masks.rank(sMasks, slot // top_k, expert)
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
        mCorrection: cute.Tensor,  # (experts,)
        sMasks: cute.Tensor,  # (max_experts, words), written
        sExperts: cute.Tensor,  # (slots,)
        sScores: cute.Tensor,  # (max_experts, warps)
        sServed: cute.Tensor,  # (max_experts,)
        sProposals: cute.Tensor,  # (slots,), written
        first_token: Int32,
        num_tokens: Int32,
        top_k: Int32,
        groups: tuple,
        capacity: Int32,
    ):
        """The unplaced slots of each token propose to its best experts that have room."""
        group_size, top_groups, group_lanes = groups
        lane, experts = cute.arch.lane_idx(), cute.size(mCorrection)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw, logits, corrections, group_bits, keys = self.block.registers(mLogits)
        self.block.load_rule(mCorrection, corrections, group_bits, experts, group_size, group_lanes)
        for token in cutlass.range(warp, num_tokens, self.block.warps, unroll=1):
            first_slot, used = token * top_k, Int32(0)
            if lane < top_k:
                used = Int32(sExperts[first_slot + lane])
                sProposals[first_slot + lane] = Int16(-1)
            cute.arch.sync_warp()
            unplaced = Uint32(cute.arch.vote_ballot_sync(used < 0))
            if unplaced > Uint32(0):
                self.block.load(mLogits[None, None, first_token + token], raw)
                self.block.widen(raw, logits, experts)
                self.block.make_keys(
                    logits, corrections, group_bits, sScores[None, warp], keys, experts,
                    group_size, top_groups, group_lanes,
                )  # fmt: skip
                for i in cutlass.range_constexpr(self.block.per_lane):
                    is_open = Boolean(True)
                    if cutlass.const_expr(self.block.score.is_softmax):
                        is_open = logits[i] > -Float32.inf
                    if sServed[self.block.expert_of(i)] >= capacity:
                        is_open = Boolean(False)
                    if not is_open:
                        keys[i] = Uint32(0)
                for slot in cutlass.range(top_k, unroll=1):
                    self.block.remove(keys, cute.arch.shuffle_sync(used, slot))
                for slot in cutlass.range(top_k, unroll=1):
                    if (unplaced >> Uint32(slot)) & Uint32(1) == Uint32(1):
                        expert, key = self.block.take_best(keys)
                        if (key > Uint32(0)) & (lane == 0):
                            sProposals[first_slot + slot] = Int16(expert)
                            token_masks.add(sMasks, token, expert)

    @cute.jit
    def finish(
        self,
        mLogits: cute.Tensor,  # (vector, experts / vector, tokens)
        sMasks: cute.Tensor,  # (max_experts, words), written
        sExperts: cute.Tensor,  # (slots,)
        sWeights: cute.Tensor,  # (slots,), written
        first_token: Int32,
        num_tokens: Int32,
        top_k: Int32,
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
            self.block.widen(raw, logits, mLogits.shape[1] * self.block.vector)
            logit = self.block.stored_logit(mLogits, row, expert)
            max_logit = self.block.max_of(logits)
            weight = self.block.weigh(logits, expert, logit, max_logit, scaling)
            if lane < top_k:
                if expert >= 0:
                    token_masks.add(sMasks, token, expert)
                sWeights[slot] = weight
