// Sums in a defined order: neighbours are added, then neighbouring sums, and so on. Every operation
// rounds to nearest, so every kernel that adds in this order gets the same bits.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// The sum of kCount values, a power of two.
template <int kCount>
__device__ __forceinline__ float sum_pairs(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) sums[i] = __fadd_rn(values[2 * i], values[2 * i + 1]);
    return sum_pairs(sums);
  }
}

// The sum over the lanes whose numbers agree in the bits below kMinMask, by default over the warp;
// each of these lanes returns the sum.
template <int kMinMask = 1>
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
  for (int mask = kMinMask; mask < kWarpThreads; mask *= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

// kCount sums over the warp, one of each value; kCount is a power of two. Lane l returns the sum of
// values[l % kCount]: two lanes exchange half of the values that they hold, until every lane holds
// one value.
template <int kMask = 1, int kCount>
__device__ __forceinline__ float sum_each_over_lanes(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return sum_lanes<kMask>(values[0]);
  } else {
    const bool is_odd = threadIdx.x & kMask;
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float retained = is_odd ? values[2 * i + 1] : values[2 * i];
      const float sent = is_odd ? values[2 * i] : values[2 * i + 1];
      sums[i] = __fadd_rn(retained, __shfl_xor_sync(0xffffffff, sent, kMask));
    }
    return sum_each_over_lanes<2 * kMask>(sums);
  }
}

}  // namespace kernelcat
