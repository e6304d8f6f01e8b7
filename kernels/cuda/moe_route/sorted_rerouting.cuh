// Rounds of rerouting within a cluster.
#pragma once

#include "cluster_rounds.cuh"
#include "sorted_block.cuh"

namespace kernelcat::sorted {

// Rounds of rerouting: assignments beyond the capacity propose to further experts. All thread
// blocks of the cluster go through the same rounds, because they compute the same sums.
template <typename Setup>
struct Rerouting {
  static constexpr int kMaxExperts = Setup::kMaxExperts, kTopK = Setup::kTopK;
  int served[kMaxExperts];         // assignments that are accepted, of the whole cluster
  int num_refused;                 // proposals of the last round, of the whole cluster
  short proposals[Setup::kSlots];  // -1 for a slot without a proposal

  // Accepts the proposals that `masks` and `sums` describe; an accepted one goes to `experts`.
  __device__ __forceinline__ void accept(Selection<Setup>& selection,
                                         const ExpertCounts<kMaxExperts>& sums, int num_slots,
                                         int capacity) {
    for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
      const int expert = proposals[slot];
      if (expert < 0) continue;
      const int rank = sums.earlier[expert] + selection.masks.rank(slot / kTopK, expert);
      if (served[expert] + rank < capacity) selection.experts[slot] = expert;
    }
    if (threadIdx.x == 0) num_refused = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < kMaxExperts; e += Setup::kThreads) {
      const int wanted = served[e] + sums.totals[e];
      served[e] = min(wanted, capacity);
      if (wanted > capacity) atomicAdd(&num_refused, wanted - capacity);
    }
    selection.masks.clear();
    __syncthreads();
  }

  // The unplaced slots of each token propose to its best experts that have room.
  __device__ __forceinline__ void propose(Selection<Setup>& selection,
                                          const TokenBlock<Setup>& block, int capacity) {
    using Experts = typename Setup::Experts;
    const auto corrections = block.corrections();
    for (int i = 0; block.has_token(i); ++i) {
      const int first_slot = block.token(i) * kTopK;
      const bool is_slot = lane_index() < kTopK;
      const int used = is_slot ? selection.experts[first_slot + lane_index()] : 0;
      const uint32_t unplaced = __ballot_sync(kAllLanes, used < 0);
      if (is_slot) proposals[first_slot + lane_index()] = -1;
      __syncwarp();
      if (unplaced == 0) continue;
      typename Setup::Logits values = {};
      values.load(block.row(i));
      auto candidates = block.candidates(values, corrections);
#pragma unroll
      for (int j = 0; j < Experts::kPerLane; ++j) {
        uint32_t& key = candidates.keys[j];
        const bool is_full = key != 0 && served[~candidates.tails[j]] >= capacity;
        const bool is_masked = Setup::kScore == Score::kSoftmax && key == ordered_bits(-kInfinity);
        if (is_full || is_masked) key = 0;
      }
      for (int slot = 0; slot < kTopK; ++slot) {
        candidates.remove(__shfl_sync(kAllLanes, used, slot));
      }
      candidates.sort();
      for (int slot = 0; slot < kTopK; ++slot) {
        if (!(unplaced >> slot & 1)) continue;
        bool is_mine;
        int expert;
        const uint32_t key = candidates.take_best(is_mine, expert);
        if (is_mine && key != 0) {
          proposals[first_slot + slot] = expert;
          selection.masks.add(block.token(i), expert);
        }
      }
    }
  }

  // From selected experts to the experts that are used in the end, with their weights and sums.
  __device__ __forceinline__ void run(Selection<Setup>& selection, const TokenBlock<Setup>& block,
                                      ClusterCounts<Setup>& counts, ExpertCounts<kMaxExperts>& sums,
                                      const Routed& out, int rank, int capacity) {
    const int num_slots = block.num_tokens * kTopK;
    for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
      proposals[slot] = selection.experts[slot];
      selection.experts[slot] = -1;
    }
    for (int e = threadIdx.x; e < kMaxExperts; e += Setup::kThreads) {
      served[e] = 0;
      if (rank == 0 && out.load && e < Setup::Experts::kExperts) out.load[e] += sums.totals[e];
    }
    __syncthreads();
    int buffer = 0;
    accept(selection, sums, num_slots, capacity);
    while (num_refused > 0) {
      propose(selection, block, capacity);
      counts.add_up(selection.masks, sums, rank, buffer ^= 1);
      accept(selection, sums, num_slots, capacity);
    }
    finish(selection, block);
    counts.add_up(selection.masks, sums, rank, buffer ^ 1);
  }

  // Masks and weights of the experts that are used in the end.
  __device__ __forceinline__ void finish(Selection<Setup>& selection,
                                         const TokenBlock<Setup>& block) {
    for (int i = 0; block.has_token(i); ++i) {
      const int slot = block.token(i) * kTopK + lane_index();
      const int expert = lane_index() < kTopK ? selection.experts[slot] : -1;
      typename Setup::Logits values = {};
      values.load(block.row(i));
      const float max_logit = max_of<typename Setup::T, typename Setup::Experts>(values);
      float numerator = 0.0f;
      if (expert >= 0) {
        numerator = unscaled_weight<Setup::kScore>(to_float(block.row(i)[expert]), max_logit);
        selection.masks.add(block.token(i), expert);
      }
      const float weight = block.weight(values, numerator, max_logit);
      if (lane_index() < kTopK) selection.weights[slot] = weight;
    }
  }
};

}  // namespace kernelcat::sorted
