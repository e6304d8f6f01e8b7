// Sums of the ranks' elements in float32, in the order of the ranks, rounded once.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Word i of a vector. A pointer to its words would keep the vector in local memory.
__device__ __forceinline__ uint32_t word_of(const uint2& vector, int i) {
  return i == 0 ? vector.x : vector.y;
}
__device__ __forceinline__ uint32_t word_of(const uint4& vector, int i) {
  return i < 2 ? word_of(uint2{vector.x, vector.y}, i) : word_of(uint2{vector.z, vector.w}, i - 2);
}

// One of two vectors, chosen word by word: a choice of references would keep both in local memory.
__device__ __forceinline__ uint4 select(bool is_first, const uint4& first, const uint4& second) {
  return {is_first ? first.x : second.x, is_first ? first.y : second.y,
          is_first ? first.z : second.z, is_first ? first.w : second.w};
}

// kPairs pairs of elements, a pair in each word of `part`.
template <typename T, int kPairs>
struct PairSums {
  float sums[2 * kPairs];

  template <typename Vector>
  __device__ __forceinline__ void start(const Vector& part) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) sums[i] = element(part, i);
  }

  template <typename Vector>
  __device__ __forceinline__ void add(const Vector& part) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) sums[i] += element(part, i);
  }

  __device__ __forceinline__ uint32_t rounded(int pair) const {
    return pack<T>(sums[2 * pair], sums[2 * pair + 1]);
  }

 private:
  template <typename Vector>
  __device__ __forceinline__ static float element(const Vector& part, int i) {
    const uint32_t word = word_of(part, i / 2);
    return to_float(reinterpret_cast<const T*>(&word)[i % 2]);
  }
};

template <typename T>
__device__ __forceinline__ uint4 rounded_vector(const PairSums<T, 4>& sum) {
  return {sum.rounded(0), sum.rounded(1), sum.rounded(2), sum.rounded(3)};
}

}  // namespace kernelcat
