// What the thread blocks of a cluster compute together: sums of their counts, and rounds of
// rerouting.
#pragma once

#include <kernelcat/cluster_store.cuh>

#include "select_block.cuh"

namespace kernelcat {

// Numbers of assignments of every expert in every thread block of the cluster.
template <typename Setup>
struct ClusterCounts {
  static constexpr int kMaxExperts = Setup::kMaxExperts, kClusterSize = Setup::kClusterSize;
  // Two buffers: a thread block may write the next counts while another one reads these.
  alignas(4) uint16_t counts[Setup::kReroute ? 2 : 1][kClusterSize][kMaxExperts];

  // Adds up the counts of `masks` in all thread blocks. All threads of the cluster must call it.
  // Calls alternate between buffers.
  __device__ __forceinline__ void add_up(const TokenMasks<Setup::kBlockTokens, kMaxExperts>& masks,
                                         ExpertCounts<kMaxExperts>& sums, int rank, int buffer) {
    __syncthreads();
    for (int e = 2 * threadIdx.x; e < kMaxExperts; e += 2 * Setup::kThreads) {
      const uint32_t pair = masks.count(e) | masks.count(e + 1) << 16;
#pragma unroll
      for (int cta = 0; cta < kClusterSize; ++cta) {
        store_word(&counts[buffer][rank][e], pair, cta);
      }
    }
    if constexpr (kClusterSize > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    for (int e = threadIdx.x; e < kMaxExperts; e += Setup::kThreads) {
      int total = 0, earlier = 0;
#pragma unroll
      for (int cta = 0; cta < kClusterSize; ++cta) {
        if (cta == rank) earlier = total;
        total += counts[buffer][cta][e];
      }
      sums.totals[e] = total;
      sums.earlier[e] = earlier;
    }
    __syncthreads();
  }
};

// Rounds of rerouting: assignments beyond the capacity propose to further experts. All thread
// blocks of the cluster go through the same rounds, because they compute the same sums.
template <typename Setup>
struct Rerouting {
  static constexpr int kMaxExperts = Setup::kMaxExperts;
  int served[kMaxExperts];  // assignments that are accepted, of the whole cluster
  int num_refused;          // proposals of the last round, of the whole cluster
  short proposals[Setup::kBlockTokens * Setup::kMaxTopK];  // -1 for a slot without a proposal

  // Accepts the proposals that `masks` and `sums` describe; an accepted one goes to `experts`.
  __device__ __forceinline__ void accept(Selection<Setup>& selection,
                                         const ExpertCounts<kMaxExperts>& sums, int num_slots,
                                         int top_k, int capacity) {
    for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
      const int expert = proposals[slot];
      if (expert < 0) continue;
      const int rank = sums.earlier[expert] + selection.masks.rank(slot / top_k, expert);
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
    using Experts = LaneExperts<Setup::kPerLane, Setup::kVector>;
    for (int i = 0; block.has_token(i); ++i) {
      const int first_slot = block.token(i) * block.top_k;
      const bool is_slot = lane_index() < block.top_k;
      const int used = is_slot ? selection.experts[first_slot + lane_index()] : 0;
      uint32_t unplaced = __ballot_sync(kAllLanes, used < 0);
      if (is_slot) proposals[first_slot + lane_index()] = -1;
      __syncwarp();
      if (unplaced == 0) continue;
      typename Setup::Logits values = {};
      values.load(block.row(i), block.experts);
      auto keys = block.keys(values);
#pragma unroll
      for (int j = 0; j < Setup::kPerLane; ++j) {
        const int expert = Experts::at(j);
        const bool has_logit = values.at(j, block.experts) > -kInfinity;
        const bool is_open = expert < block.experts && served[expert] < capacity;
        if (!is_open || (Setup::kScore == Score::kSoftmax && !has_logit)) keys.keys[j] = 0;
      }
      for (int slot = 0; slot < block.top_k; ++slot) {
        keys.remove(__shfl_sync(kAllLanes, used, slot));
      }
      for (; unplaced != 0 && !keys.is_empty(); unplaced &= unplaced - 1) {
        const int expert = keys.take_best(), slot = __ffs(unplaced) - 1;
        if (lane_index() == 0) {
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
    const int num_slots = block.num_tokens * block.top_k;
    for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
      proposals[slot] = selection.experts[slot];
      selection.experts[slot] = -1;
    }
    for (int e = threadIdx.x; e < kMaxExperts; e += Setup::kThreads) {
      served[e] = 0;
      if (rank == 0 && out.load && e < block.experts) out.load[e] += sums.totals[e];
    }
    __syncthreads();
    int buffer = 0;
    accept(selection, sums, num_slots, block.top_k, capacity);
    while (num_refused > 0) {
      propose(selection, block, capacity);
      counts.add_up(selection.masks, sums, rank, buffer ^= 1);
      accept(selection, sums, num_slots, block.top_k, capacity);
    }
    finish(selection, block, out);
    counts.add_up(selection.masks, sums, rank, buffer ^ 1);
  }

  // Masks, expert_ids and weights of the experts that are used in the end.
  __device__ __forceinline__ void finish(Selection<Setup>& selection,
                                         const TokenBlock<Setup>& block, const Routed& out) {
    for (int i = 0; block.has_token(i); ++i) {
      const int slot = block.token(i) * block.top_k + lane_index();
      const int expert = lane_index() < block.top_k ? selection.experts[slot] : -1;
      typename Setup::Logits values = {};
      values.load(block.row(i), block.experts);
      const float weight = block.weight(i, expert, block.scale(values));
      if (expert >= 0) selection.masks.add(block.token(i), expert);
      if (lane_index() < block.top_k) {
        out.expert_ids[block.first_token * block.top_k + slot] = expert;
        out.weights[block.first_token * block.top_k + slot] = weight;
      }
    }
  }
};

}  // namespace kernelcat
