// Sums of the ranks' elements in float32, in the order of the ranks, rounded once.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// kPairs pairs of elements, a pair in each word of `part`.
template <typename T, int kPairs>
struct PairSums {
  float sums[2 * kPairs];

  template <typename Vector>
  __device__ __forceinline__ void start(const Vector& part) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) sums[i] = to_float(reinterpret_cast<const T*>(&part)[i]);
  }

  template <typename Vector>
  __device__ __forceinline__ void add(const Vector& part) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) sums[i] += to_float(reinterpret_cast<const T*>(&part)[i]);
  }

  __device__ __forceinline__ uint32_t rounded(int pair) const {
    return pack<T>(sums[2 * pair], sums[2 * pair + 1]);
  }
};

template <typename T>
__device__ __forceinline__ uint4 rounded_vector(const PairSums<T, 4>& sum) {
  return {sum.rounded(0), sum.rounded(1), sum.rounded(2), sum.rounded(3)};
}

}  // namespace kernelcat
