// One thread block selects the experts of a block of tokens, one warp for each token at a time.
#pragma once

#include "maps.cuh"
#include "sorted_select.cuh"
#include "token_masks.cuh"

namespace kernelcat::sorted {

// What is compiled in. kBlockTokens is the number of tokens of a thread block.
template <typename Element, Score kScore_, bool kRenormalize_, bool kReroute_, typename Experts_,
          int kTopK_, int kMaxExperts_, int kWarps_, int kBlockTokens_, int kClusterSize_>
struct Setup {
  using T = Element;
  using Experts = Experts_;
  static constexpr Score kScore = kScore_;
  static constexpr bool kRenormalize = kRenormalize_, kReroute = kReroute_;
  static constexpr int kTopK = kTopK_, kMaxExperts = kMaxExperts_, kWarps = kWarps_;
  static constexpr int kBlockTokens = kBlockTokens_, kClusterSize = kClusterSize_;
  static constexpr int kThreads = kWarps * kWarpThreads;
  static constexpr int kWarpTokens = (kBlockTokens + kWarps - 1) / kWarps;
  static constexpr int kSlots = kBlockTokens * kTopK;
  using Logits = LaneLogits<T, Experts>;
  using Candidates = LaneCandidates<Experts>;
  static_assert(Experts::kExperts <= kMaxExperts);
};

// A block of tokens, which are routed by one thread block.
template <typename Setup>
struct TokenBlock {
  using T = typename Setup::T;
  using Experts = typename Setup::Experts;
  const T* logits;          // (tokens, experts)
  const float* correction;  // (experts,) or null
  int first_token, num_tokens;
  float scaling;
  float* sigmoids;  // (experts,) in shared memory for each warp, for kSigmoid
  int warp;

  // The warp's token number i in the thread block, and its row.
  __device__ __forceinline__ int token(int i) const { return i * Setup::kWarps + warp; }
  __device__ __forceinline__ bool has_token(int i) const {
    return i < Setup::kWarpTokens && token(i) < num_tokens;
  }
  __device__ __forceinline__ const T* row(int i) const {
    return logits + static_cast<int64_t>(first_token + token(i)) * Experts::kExperts;
  }

  __device__ __forceinline__ LaneWords<Experts> corrections() const {
    LaneWords<Experts> values = {};
    if (Setup::kScore == Score::kSigmoid && correction) values.load(correction);
    return values;
  }
  __device__ __forceinline__ typename Setup::Candidates candidates(
      const typename Setup::Logits& values, const LaneWords<Experts>& corrections) const {
    return make_candidates<Setup::kScore, T, Experts>(values, corrections, sigmoids);
  }
  __device__ __forceinline__ float weight(const typename Setup::Logits& values, float numerator,
                                          float max_logit) const {
    return weigh<Setup::kScore, Setup::kRenormalize, T, Experts>(values, numerator, max_logit,
                                                                 scaling);
  }

  static __device__ __forceinline__ TokenBlock of(const T* logits, const float* correction,
                                                  int block, int tokens, float scaling) {
    extern __shared__ float4 all_sigmoids[];
    const int first_token = block * Setup::kBlockTokens, warp = warp_index();
    return {.logits = logits,
            .correction = correction,
            .first_token = first_token,
            .num_tokens = min(tokens - first_token, Setup::kBlockTokens),
            .scaling = scaling,
            .sigmoids = reinterpret_cast<float*>(all_sigmoids) + warp * Experts::kExperts,
            .warp = warp};
  }
};

// What the tokens of a thread block selected: an expert and its weight for each slot (kBlockTokens,
// kTopK).
template <typename Setup>
struct Selection {
  TokenMasks<Setup::kBlockTokens, Setup::kMaxExperts> masks;
  float weights[Setup::kSlots];
  short experts[Setup::kSlots];

  // Stores expert_ids and weights of `num_tokens`, from token `first_token` of the outputs on.
  __device__ __forceinline__ void store(const Routed& out, int first_token, int num_tokens) const {
    for (int slot = threadIdx.x; slot < num_tokens * Setup::kTopK; slot += Setup::kThreads) {
      out.expert_ids[first_token * Setup::kTopK + slot] = experts[slot];
      out.weights[first_token * Setup::kTopK + slot] = weights[slot];
    }
  }
};

// Gets `selection` ready for `select_block`; all threads of the thread block must call it.
template <typename Setup>
__device__ __forceinline__ void clear(Selection<Setup>& selection) {
  selection.masks.clear();
  __syncthreads();
}

// Selects experts: writes masks, experts and weights. `clear` comes before it, and a barrier of the
// thread block must follow it.
template <typename Setup>
__device__ __forceinline__ void select_block(Selection<Setup>& selection,
                                             const TokenBlock<Setup>& block) {
  constexpr int kTopK = Setup::kTopK;
  typename Setup::Logits next = {};
  if (block.has_token(0)) next.load(block.row(0));
  const auto corrections = block.corrections();
  for (int i = 0; block.has_token(i); ++i) {
    const typename Setup::Logits values = next;
    if (block.has_token(i + 1)) next.load(block.row(i + 1));
    auto candidates = block.candidates(values, corrections);
    const int first_slot = block.token(i) * kTopK;
    uint32_t key = 0, max_key = 0;
#pragma unroll
    for (int slot = 0; slot < kTopK; ++slot) {
      bool is_mine;
      int head;
      const uint32_t best = candidates.take_best(is_mine, head);
      if (is_mine) selection.experts[first_slot + slot] = head;
      key = lane_index() == slot ? best : key;
      if (slot == 0) max_key = best;
    }
    __syncwarp();
    float numerator = 0.0f;
    const float max_logit = from_ordered_bits(max_key);
    if (lane_index() < kTopK) {
      const int expert = selection.experts[first_slot + lane_index()];
      selection.masks.add(block.token(i), expert);
      if constexpr (Setup::kScore == Score::kSoftmax) {
        numerator = unscaled_weight<Setup::kScore>(from_ordered_bits(key), max_logit);
      } else {
        numerator = block.sigmoids[expert];
      }
    }
    const float weight = block.weight(values, numerator, max_logit);
    if (lane_index() < kTopK) selection.weights[first_slot + lane_index()] = weight;
    __syncwarp();  // the next token's sigmoids take the place of these
  }
}

}  // namespace kernelcat::sorted
