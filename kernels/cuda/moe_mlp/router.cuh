// The router of a layer: which experts serve a token.
#pragma once

#include <kernelcat/routing.cuh>

namespace kernelcat {

// What is compiled in: kPerLane experts for each lane of a warp, in vectors of kVector logits; with
// kGrouped, a token may use its best groups of experts only.
template <typename Logit_, Score kScore_, bool kRenormalize_, bool kGrouped_, int kPerLane_,
          int kVector_>
struct RouterKind {
  using Logit = Logit_;
  static constexpr Score kScore = kScore_;
  static constexpr bool kRenormalize = kRenormalize_, kGrouped = kGrouped_;
  static constexpr int kPerLane = kPerLane_, kVector = kVector_;
};

template <typename Kind>
struct Router {
  const typename Kind::Logit* logits;  // (tokens, experts)
  const float* correction;             // (experts,), or null
  int experts, top_k, group_size, top_groups;
  float scaling;

  // Lane i < top_k gets expert i of `token` and the expert's weight. `scratch` is (experts,) in
  // shared memory for kGrouped, and belongs to the warp. All lanes call this together.
  __device__ __forceinline__ Choice select(int64_t token, float* scratch) const {
    const auto* row = logits + token * experts;
    LaneLogits<typename Kind::Logit, Kind::kPerLane, Kind::kVector> lane_logits = {};
    lane_logits.load(row, experts);
    const auto groups = ExpertGroups::of_size(group_size, experts, top_groups);
    return select_experts<Kind::kScore, Kind::kRenormalize, Kind::kGrouped>(
        lane_logits, row, correction, experts, top_k, groups, scaling, scratch);
  }
};

// The experts of `token` go to ids and gates (tokens, top_k).
__device__ __forceinline__ void store_choice(const Choice& choice, int64_t token, int top_k,
                                             int* ids, float* gates) {
  if (lane_index() >= top_k) return;
  ids[token * top_k + lane_index()] = choice.expert;
  gates[token * top_k + lane_index()] = choice.weight;
}

}  // namespace kernelcat
