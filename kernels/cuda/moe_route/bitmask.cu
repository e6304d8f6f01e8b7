// Routing with one warp for each token, and bit masks of the tokens that use an expert.
//
// Up to 512 tokens: one launch of one cluster, whose thread blocks write the numbers of their
// assignments into each other's shared memory. More tokens: `select` leaves these numbers in global
// memory, and `place`, the second launch, adds them up.
#include <kernelcat/cluster_store.cuh>
#include <kernelcat/pdl.cuh>

#include "maps.cuh"
#include "token_masks.cuh"
#include "warp_select.cuh"

namespace kernelcat {

// What is compiled in. kBlockTokens is the number of tokens of a thread block.
template <typename Element, Score kScore_, bool kRenormalize_, bool kGrouped_, int kPerLane_,
          int kVector_, int kWarps_, int kBlockTokens_, int kClusterSize_>
struct Setup {
  using T = Element;
  static constexpr Score kScore = kScore_;
  static constexpr bool kRenormalize = kRenormalize_, kGrouped = kGrouped_;
  static constexpr int kPerLane = kPerLane_, kVector = kVector_, kWarps = kWarps_;
  static constexpr int kBlockTokens = kBlockTokens_, kClusterSize = kClusterSize_;
  static constexpr int kThreads = kWarps * kWarpThreads, kMaxExperts = kPerLane * kWarpThreads;
  static constexpr int kWarpTokens = (kBlockTokens + kWarps - 1) / kWarps;
  static constexpr int kMaxTopK = 16;
};

// What the thread block's tokens selected.
template <typename Setup>
struct Selection {
  TokenMasks<Setup::kBlockTokens, Setup::kMaxExperts> masks;
  uint16_t experts[Setup::kBlockTokens * Setup::kMaxTopK];  // (kBlockTokens, top_k)
};

// Selects the experts of tokens first_token ... and stores expert_ids and weights. All threads of
// the thread block must call it; a barrier of the thread block must precede the use of `selection`.
template <typename Setup>
__device__ __forceinline__ void select_block(Selection<Setup>& selection,
                                             const typename Setup::T* logits,
                                             const float* correction, const Routed& out,
                                             int first_token, int tokens, int experts, int top_k,
                                             const ExpertGroups& groups, float scaling) {
  extern __shared__ float scratch[];  // (warps, experts) for groups
  selection.masks.clear();
  const int warp = warp_index();
  const auto local_token = [&](int i) { return i * Setup::kWarps + warp; };
  const auto row_of = [&](int i) {
    return logits + static_cast<int64_t>(first_token + local_token(i)) * experts;
  };
  const auto is_token = [&](int i) {
    return local_token(i) < Setup::kBlockTokens && first_token + local_token(i) < tokens;
  };
  using Logits = LaneLogits<typename Setup::T, Setup::kPerLane, Setup::kVector>;
  Logits next = {};
  if (is_token(0)) next.load(row_of(0), experts);
  __syncthreads();
  for (int i = 0; i < Setup::kWarpTokens && is_token(i); ++i) {
    const Logits current = next;
    if (i + 1 < Setup::kWarpTokens && is_token(i + 1)) next.load(row_of(i + 1), experts);
    const Choice choice = select_experts<Setup::kScore, Setup::kRenormalize, Setup::kGrouped>(
        current, row_of(i), correction, experts, top_k, groups, scaling,
        scratch + warp * experts);
    if (lane_index() < top_k) {
      const int slot = local_token(i) * top_k + lane_index();
      selection.experts[slot] = choice.expert;
      selection.masks.add(local_token(i), choice.expert);
      out.expert_ids[first_token * top_k + slot] = choice.expert;
      out.weights[first_token * top_k + slot] = choice.weight;
    }
  }
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
                      int tokens, int experts, int top_k, int group_size, int top_groups,
                      float scaling, int capacity) {
  constexpr int kMaxExperts = Setup::kMaxExperts, kClusterSize = Setup::kClusterSize;
  __shared__ Selection<Setup> selection;
  alignas(4) __shared__ uint16_t block_counts[kClusterSize][kMaxExperts];
  __shared__ ExpertCounts<kMaxExperts> sums;
  if constexpr (kClusterSize > 1) cluster_arrive_relaxed();
  const int rank = kClusterSize > 1 ? cluster_rank() : 0, first_token = rank * Setup::kBlockTokens;
  const Routed out = {expert_ids, weights, counts, offsets, order, position, load};
  const ExpertGroups groups = ExpertGroups::of_size(group_size, experts, top_groups);
  grid_dependency_wait();
  select_block(selection, logits, correction, out, first_token, tokens, experts, top_k, groups,
               scaling);
  __syncthreads();
  if constexpr (kClusterSize > 1) cluster_wait();  // all thread blocks have begun
  for (int e = 2 * threadIdx.x; e < kMaxExperts; e += 2 * Setup::kThreads) {
    const uint32_t pair = selection.masks.count(e) | selection.masks.count(e + 1) << 16;
#pragma unroll
    for (int cta = 0; cta < kClusterSize; ++cta) store_word(&block_counts[rank][e], pair, cta);
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
      total += block_counts[cta][e];
    }
    sums.totals[e] = total;
    sums.earlier[e] = earlier;
  }
  __syncthreads();
  if (warp_index() == 0) sums.scan(experts, capacity);
  __syncthreads();
  if (rank == 0) sums.store(out, experts, capacity);
  const int num_slots = min(tokens - first_token, Setup::kBlockTokens) * top_k;
  for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
    const int expert = selection.experts[slot];
    const int local_rank = selection.masks.rank(slot / top_k, expert);
    sums.place(out, first_token * top_k + slot, expert, local_rank, capacity);
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
  const int first_token = blockIdx.x * Setup::kBlockTokens;
  const ExpertGroups groups = ExpertGroups::of_size(group_size, experts, top_groups);
  grid_dependency_wait();
  launch_dependents();
  select_block(selection, logits, correction, {.expert_ids = expert_ids, .weights = weights},
               first_token, tokens, experts, top_k, groups, scaling);
  __syncthreads();
  constexpr int kWords = Setup::kMaxExperts / 4;
  for (int i = threadIdx.x; i < kWords; i += Setup::kThreads) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= selection.masks.count(4 * i + j) << 8 * j;
    block_counts[blockIdx.x * kWords + i] = word;
  }
  const int num_slots = min(tokens - first_token, Setup::kBlockTokens) * top_k;
  for (int slot = threadIdx.x; slot < num_slots; slot += Setup::kThreads) {
    position[first_token * top_k + slot] =
        selection.masks.rank(slot / top_k, selection.experts[slot]);
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
