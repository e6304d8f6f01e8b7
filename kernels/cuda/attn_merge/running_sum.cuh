// What is known of a row after some of its parts: a sum of exp(lse), relative to the largest lse so
// that no exponential overflows. Results are summed beside it, by the weights it gives.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLowest = __builtin_bit_cast(float, 0xff7fffff);  // of the finite

// Whether a part counts. The result of one that does not may hold anything.
__device__ __forceinline__ bool is_seen(float lse) {
  return lse > -kInfinity;
}

struct RunningSum {
  float most = kLowest;  // finite, so that no difference is infinity minus infinity
  float total = 0.0f;

  // Makes sums relative to `lse` if that is larger; returns what they are multiplied by.
  __device__ __forceinline__ float raise(float lse) {
    const float new_most = fmaxf(most, lse), kept = __expf(most - new_most);
    most = new_most;
    total *= kept;
    return kept;
  }

  // The weight of a part whose lse is no more than `most`; zero if it was not seen.
  __device__ __forceinline__ float add(float lse) {
    const float weight = __expf(lse - most);
    total += weight;
    return weight;
  }

  // Of the sum of results. The total is 0 where no part was seen, else at least about 1.
  __device__ __forceinline__ float factor() const {
    return total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
  }
  __device__ __forceinline__ float lse() const {
    return total > 0.0f ? most + logf(total) : -kInfinity;
  }
};

}  // namespace kernelcat
