// The weights by which the parts of a row are added up, while the largest log-sum-exp is not known
// yet: weights are relative to the largest so far, so that no exponential overflows.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

constexpr float kLowestFloat = __builtin_bit_cast(float, 0xff7fffff);  // the lowest finite one

// Whether a part had a visible key. The result of a part without any may hold anything, NaN too.
__device__ __forceinline__ bool has_keys(float part_lse) {
  return part_lse > -kInfinity;
}

struct PartWeights {
  float max_lse = kLowestFloat;  // finite, so that no difference is infinity minus infinity
  float weight_sum = 0.0f;

  // Makes weights relative to `lse` if `lse` is larger than `max_lse`. Returns the factor by which
  // everything that has been added up must be multiplied.
  __device__ __forceinline__ float raise_max(float lse) {
    const float new_max = fmaxf(max_lse, lse), rescale = __expf(max_lse - new_max);
    max_lse = new_max;
    weight_sum *= rescale;
    return rescale;
  }

  // The weight of a part whose lse is at most `max_lse`; 0 for a part without keys.
  __device__ __forceinline__ float add(float lse) {
    const float weight = __expf(lse - max_lse);
    weight_sum += weight;
    return weight;
  }

  // output = weighted sum of the parts * factor. The sum of weights is 0 where no part had a key,
  // else at least about 1.
  __device__ __forceinline__ float factor() const {
    return weight_sum > 0.0f ? __fdividef(1.0f, weight_sum) : 0.0f;
  }
  __device__ __forceinline__ float lse() const {
    return weight_sum > 0.0f ? max_lse + logf(weight_sum) : -kInfinity;
  }
};

}  // namespace kernelcat
