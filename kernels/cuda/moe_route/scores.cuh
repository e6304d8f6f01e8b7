// Scores of a token's experts, and the weights that are made of them.
#pragma once

#include <kernelcat/softmax.cuh>
#include <kernelcat/types.cuh>

namespace kernelcat {

using float32 = float;

enum class Score { kSoftmax, kSigmoid };

__device__ __forceinline__ float to_float(float value) {
  return value;
}

// 1 / (1 + exp(-logit)); 0 for -infinity.
__device__ __forceinline__ float sigmoid(float logit) {
  return __fdividef(1.0f, 1.0f + fast_exp2(-kLog2E * logit));
}

// What experts are selected by, before the limit to groups. `correction` is (experts,) or null.
template <Score kScore>
__device__ __forceinline__ float selection_score(float logit, const float* correction, int expert) {
  if constexpr (kScore == Score::kSoftmax) return logit;
  return sigmoid(logit) + (correction ? __ldg(correction + expert) : 0.0f);
}

// The numerator of a weight; `max_logit` is the token's largest logit.
template <Score kScore>
__device__ __forceinline__ float unscaled_weight(float logit, float max_logit) {
  return kScore == Score::kSoftmax ? fast_exp2(kLog2E * (logit - max_logit)) : sigmoid(logit);
}

}  // namespace kernelcat
