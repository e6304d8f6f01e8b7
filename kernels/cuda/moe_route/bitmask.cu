// Routing with one warp for each token, and bit masks of the tokens that use an expert.
//
// Up to 512 tokens: one launch of one cluster, whose thread blocks write the numbers of their
// assignments into each other's shared memory. More tokens: `select` leaves these numbers in global
// memory, and `place`, the second launch, adds them up.
#include <kernelcat/pdl.cuh>

#include "cluster_rounds.cuh"

namespace kernelcat {

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
                      int tokens, int experts, int top_k, int group_size, int top_groups,
                      float scaling, int capacity) {
  constexpr int kMaxExperts = Setup::kMaxExperts, kClusterSize = Setup::kClusterSize;
  __shared__ Selection<Setup> selection;
  __shared__ ClusterCounts<Setup> cluster_counts;
  __shared__ ExpertCounts<kMaxExperts> sums;
  if constexpr (kClusterSize > 1) cluster_arrive_relaxed();
  const int rank = kClusterSize > 1 ? cluster_rank() : 0;
  const auto block = TokenBlock<Setup>::of(logits, correction, rank, tokens, experts, top_k,
                                           group_size, top_groups, scaling);
  Routed out = {expert_ids, weights, counts, offsets, order, position, load};
  grid_dependency_wait();
  select_block(selection, block, out);
  if constexpr (kClusterSize > 1) cluster_wait();  // all thread blocks have begun
  cluster_counts.add_up(selection.masks, sums, rank, 0);
  if constexpr (Setup::kReroute) {
    __shared__ Rerouting<Setup> rerouting;
    rerouting.run(selection, block, cluster_counts, sums, out, rank, capacity);
    out.load = nullptr;  // has the assignments before the limit already
  }
  if (warp_index() == 0) sums.scan(experts, capacity);
  __syncthreads();
  if (rank == 0) sums.store(out, experts, capacity);
  const int num_slots = block.num_tokens * top_k, first_slot = block.first_token * top_k;
  for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
    const int expert = selection.experts[slot];
    const int local_rank = expert < 0 ? 0 : selection.masks.rank(slot / top_k, expert);
    sums.place(out, first_slot + slot, expert, local_rank, capacity);
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
                     int tokens, int experts, int top_k, int group_size, int top_groups,
                     float scaling) {
  __shared__ Selection<Setup> selection;
  const auto block = TokenBlock<Setup>::of(logits, correction, blockIdx.x, tokens, experts, top_k,
                                           group_size, top_groups, scaling);
  grid_dependency_wait();
  launch_dependents();
  select_block(selection, block, {.expert_ids = expert_ids, .weights = weights});
  __syncthreads();
  constexpr int kWords = Setup::kMaxExperts / 4;
  for (int i = threadIdx.x; i < kWords; i += Setup::kThreads) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= selection.masks.count(4 * i + j) << 8 * j;
    block_counts[blockIdx.x * kWords + i] = word;
  }
  const int num_slots = block.num_tokens * top_k, first_slot = block.first_token * top_k;
  for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
    position[first_slot + slot] = selection.masks.rank(slot / top_k, selection.experts[slot]);
  }
}

// Adds up the counts of all thread blocks of `select`, and places the assignments of one of them.
template <int kMaxExperts, int kThreads>
__global__ void __launch_bounds__(kThreads)
    moe_route_place(const uint32_t* block_counts,  // (gridDim.x, kMaxExperts / 4)
                    int* expert_ids,               // (tokens, top_k)
                    float* weights,                // (tokens, top_k)
                    int* counts,                   // (experts,)
                    int* offsets,                  // (experts + 1,)
                    int* order,                    // (tokens * top_k,)
                    int* position,                 // (tokens, top_k)
                    int* load,                     // (experts,) or null
                    int tokens, int experts, int top_k, int block_tokens, int capacity) {
  constexpr int kWords = kMaxExperts / 4, kSlices = kThreads / kWords;
  static_assert(kSlices > 0);
  __shared__ ExpertCounts<kMaxExperts> sums;
  const Routed out = {expert_ids, weights, counts, offsets, order, position, load};
  for (int e = threadIdx.x; e < kMaxExperts; e += kThreads) sums.totals[e] = sums.earlier[e] = 0;
  __syncthreads();
  grid_dependency_wait();
  launch_dependents();
  const int word_idx = threadIdx.x % kWords, slice = threadIdx.x / kWords;
  if (slice < kSlices) {
    int total[4] = {}, earlier[4] = {};
#pragma unroll 8
    for (int block = slice; block < gridDim.x; block += kSlices) {
      const uint32_t word = block_counts[block * kWords + word_idx];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int count = word >> 8 * j & 0xff;
        total[j] += count;
        earlier[j] += block < blockIdx.x ? count : 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      atomicAdd(&sums.totals[4 * word_idx + j], total[j]);
      atomicAdd(&sums.earlier[4 * word_idx + j], earlier[j]);
    }
  }
  __syncthreads();
  if (warp_index() == 0) sums.scan(experts, capacity);
  __syncthreads();
  if (blockIdx.x == 0) sums.store(out, experts, capacity);
  const int first = blockIdx.x * block_tokens * top_k;
  const int end = min(first + block_tokens * top_k, tokens * top_k);
  for (int i = first + threadIdx.x; i < end; i += kThreads) {
    sums.place(out, i, expert_ids[i], position[i], capacity);
  }
}

}  // namespace kernelcat
