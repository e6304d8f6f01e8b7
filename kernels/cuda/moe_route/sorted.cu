// Routing as in bitmask.cu, with another selection: each lane sorts its experts once. Sizes are
// compiled in. More than 512 tokens are placed by the second launch of bitmask.cu.
#include <kernelcat/pdl.cuh>

#include "sorted_rerouting.cuh"

namespace kernelcat::sorted {

// Stores counts and offsets and adds to `load`, by all threads but the first warp, which may be the
// only one that has slots.
template <int kThreads, int kExperts, int kMaxExperts>
__device__ __forceinline__ void store_counts(const ExpertCounts<kMaxExperts>& sums,
                                             const Routed& out, int capacity) {
  static_assert(kThreads > kWarpThreads);
  const int first = static_cast<int>(threadIdx.x) - kWarpThreads;
  if (first < 0) return;
#pragma unroll 1
  for (int e = first; e < kExperts; e += kThreads - kWarpThreads) {
    out.counts[e] = min(sums.totals[e], capacity);
    out.offsets[e] = sums.starts[e];
    if (out.load) out.load[e] += sums.totals[e];
  }
  if (first == 0) out.offsets[kExperts] = sums.starts[kMaxExperts];
}

// All tokens in one cluster.
template <typename Setup>
__global__ void __launch_bounds__(Setup::kThreads)
    moe_route_cluster(const typename Setup::T* logits,  // (tokens, experts)
                      const float* correction,          // (experts,) or null
                      int* expert_ids,                  // (tokens, top_k)
                      float* weights,                   // (tokens, top_k)
                      int* counts,                      // (experts,)
                      int* offsets,                     // (experts + 1,)
                      int* order,                       // (tokens * top_k,)
                      int* position,                    // (tokens, top_k)
                      int* load,                        // (experts,) or null
                      int tokens, float scaling, int capacity) {
  constexpr int kMaxExperts = Setup::kMaxExperts, kClusterSize = Setup::kClusterSize;
  constexpr int kExperts = Setup::Experts::kExperts, kTopK = Setup::kTopK;
  __shared__ Selection<Setup> selection;
  __shared__ ClusterCounts<Setup> cluster_counts;
  __shared__ ExpertCounts<kMaxExperts> sums;
  if constexpr (kClusterSize > 1) cluster_arrive_relaxed();
  const int rank = kClusterSize > 1 ? cluster_rank() : 0;
  const auto block = TokenBlock<Setup>::of(logits, correction, rank, tokens, scaling);
  Routed out = {expert_ids, weights, counts, offsets, order, position, load};
  clear(selection);
  grid_dependency_wait();
  launch_dependents();
  select_block(selection, block);
  if constexpr (kClusterSize > 1) cluster_wait();  // all thread blocks have begun
  cluster_counts.add_up(selection.masks, sums, rank, 0);
  if constexpr (Setup::kReroute) {
    __shared__ Rerouting<Setup> rerouting;
    rerouting.run(selection, block, cluster_counts, sums, out, rank, capacity);
    out.load = nullptr;  // has the assignments before the limit already
  }
  if (warp_index() == 0) sums.scan(kExperts, capacity);
  __syncthreads();
  if (rank == 0) store_counts<Setup::kThreads, kExperts>(sums, out, capacity);
  const int num_slots = block.num_tokens * kTopK, first_slot = block.first_token * kTopK;
#pragma unroll 1
  for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
    const int expert = selection.experts[slot];
    const int local_rank = expert < 0 ? 0 : selection.masks.rank(slot / kTopK, expert);
    out.expert_ids[first_slot + slot] = expert;
    out.weights[first_slot + slot] = selection.weights[slot];
    sums.place(out, first_slot + slot, expert, local_rank, capacity);  // may take both back
  }
}

// Selects experts. The rank of an assignment among those of its thread block goes to `position`,
// and the number of assignments of each expert, four in a word, to `block_counts`.
template <typename Setup>
__global__ void __launch_bounds__(Setup::kThreads)
    moe_route_select(const typename Setup::T* logits,  // (tokens, experts)
                     const float* correction,          // (experts,) or null
                     int* expert_ids,                  // (tokens, top_k)
                     float* weights,                   // (tokens, top_k)
                     int* position,                    // (tokens, top_k)
                     uint32_t* block_counts,           // (thread blocks, kMaxExperts / 4)
                     int tokens, float scaling) {
  __shared__ Selection<Setup> selection;
  const auto block = TokenBlock<Setup>::of(logits, correction, blockIdx.x, tokens, scaling);
  clear(selection);
  grid_dependency_wait();
  launch_dependents();
  select_block(selection, block);
  __syncthreads();
  selection.store({.expert_ids = expert_ids, .weights = weights}, block.first_token,
                  block.num_tokens);
  constexpr int kWords = Setup::kMaxExperts / 4;
  for (int i = threadIdx.x; i < kWords; i += Setup::kThreads) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= selection.masks.count(4 * i + j) << 8 * j;
    block_counts[blockIdx.x * kWords + i] = word;
  }
  constexpr int kTopK = Setup::kTopK;
  const int num_slots = block.num_tokens * kTopK, first_slot = block.first_token * kTopK;
  for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
    position[first_slot + slot] = selection.masks.rank(slot / kTopK, selection.experts[slot]);
  }
}

}  // namespace kernelcat::sorted
