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
template <typename Element, Score kScore_, bool kRenormalize_, bool kGrouped_, bool kReroute_,
          int kPerLane_, int kVector_, int kWarps_, int kBlockTokens_, int kClusterSize_>
struct Setup {
  using T = Element;
  static constexpr Score kScore = kScore_;
  static constexpr bool kRenormalize = kRenormalize_, kGrouped = kGrouped_, kReroute = kReroute_;
  static constexpr int kPerLane = kPerLane_, kVector = kVector_, kWarps = kWarps_;
  static constexpr int kBlockTokens = kBlockTokens_, kClusterSize = kClusterSize_;
  static constexpr int kThreads = kWarps * kWarpThreads, kMaxExperts = kPerLane * kWarpThreads;
  static constexpr int kWarpTokens = (kBlockTokens + kWarps - 1) / kWarps;
  static constexpr int kMaxTopK = 16;
  using Logits = LaneLogits<T, kPerLane, kVector>;
};

// A block of tokens, which are routed by one thread block.
template <typename Setup>
struct TokenBlock {
  using T = typename Setup::T;
  const T* logits;          // (tokens, experts)
  const float* correction;  // (experts,) or null
  int first_token, num_tokens, experts, top_k;
  ExpertGroups groups;
  float scaling;
  float* scratch;  // (experts,) in shared memory for each warp, with kGrouped
  int warp;

  // The warp's token number i in the thread block, and its row.
  __device__ __forceinline__ int token(int i) const { return i * Setup::kWarps + warp; }
  __device__ __forceinline__ bool has_token(int i) const {
    return i < Setup::kWarpTokens && token(i) < num_tokens;
  }
  __device__ __forceinline__ const T* row(int i) const {
    return logits + static_cast<int64_t>(first_token + token(i)) * experts;
  }

  __device__ __forceinline__ LaneKeys<Setup::kPerLane, Setup::kVector> keys(
      const typename Setup::Logits& values) const {
    return make_keys<Setup::kScore, Setup::kGrouped>(values, correction, experts, groups, scratch);
  }
  __device__ __forceinline__ WeightScale scale(const typename Setup::Logits& values) const {
    return weight_scale<Setup::kScore, Setup::kRenormalize>(values, experts);
  }
  __device__ __forceinline__ float weight(int i, int expert, WeightScale scale) const {
    return weigh<Setup::kScore, Setup::kRenormalize>(row(i), expert, scale, scaling);
  }

  static __device__ __forceinline__ TokenBlock of(const T* logits, const float* correction,
                                                  int block, int tokens, int experts, int top_k,
                                                  int group_size, int top_groups, float scaling) {
    extern __shared__ float all_scratch[];
    const int first_token = block * Setup::kBlockTokens, warp = warp_index();
    return {.logits = logits,
            .correction = correction,
            .first_token = first_token,
            .num_tokens = min(tokens - first_token, Setup::kBlockTokens),
            .experts = experts,
            .top_k = top_k,
            .groups = ExpertGroups::of_size(group_size, experts, top_groups),
            .scaling = scaling,
            .scratch = all_scratch + warp * experts,
            .warp = warp};
  }
};

// What the tokens of a thread block selected: an expert for each of (kBlockTokens, top_k) slots.
template <typename Setup>
struct Selection {
  TokenMasks<Setup::kBlockTokens, Setup::kMaxExperts> masks;
  short experts[Setup::kBlockTokens * Setup::kMaxTopK];
};

// Selects experts, and stores expert_ids and weights. All threads of the thread block must call
// it; a barrier of the thread block must precede the use of `selection`.
template <typename Setup>
__device__ __forceinline__ void select_block(Selection<Setup>& selection,
                                             const TokenBlock<Setup>& block, const Routed& out) {
  selection.masks.clear();
  typename Setup::Logits next = {};
  if (block.has_token(0)) next.load(block.row(0), block.experts);
  __syncthreads();
  for (int i = 0; block.has_token(i); ++i) {
    const typename Setup::Logits values = next;
    if (block.has_token(i + 1)) next.load(block.row(i + 1), block.experts);
    const WeightScale scale = block.scale(values);
    auto keys = block.keys(values);
    int expert = -1;
    for (int slot = 0; slot < block.top_k; ++slot) {
      const int best = keys.take_best();
      if (lane_index() == slot) expert = best;
    }
    const float weight = block.weight(i, expert, scale);
    if (expert >= 0) {
      const int slot = block.token(i) * block.top_k + lane_index();
      selection.experts[slot] = expert;
      selection.masks.add(block.token(i), expert);
      out.expert_ids[block.first_token * block.top_k + slot] = expert;
      out.weights[block.first_token * block.top_k + slot] = weight;
    }
  }
}

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
