// One thread block selects the experts of a block of tokens, one warp for each token at a time.
#pragma once

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

}  // namespace kernelcat
