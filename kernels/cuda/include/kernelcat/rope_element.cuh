// RoPE of one element of a head, which reads its partner in the rotation.
#pragma once

#include <kernelcat/token_slots.cuh>

namespace kernelcat {

__device__ __forceinline__ float element(float value) {
  return value;
}
template <typename T>
__device__ __forceinline__ float element(T value) {
  return to_float(value);
}

// Element `dim` of a head after RoPE. `x` is (head_dim,), `cos_sin` (rotary_dim,) of the token's
// position: cosines, then sines.
template <RopeStyle kStyle, typename X>
__device__ __forceinline__ float rotated(const X* x, int dim, const float* cos_sin,
                                         int rotary_dim) {
  const float value = element(x[dim]);
  if (dim >= rotary_dim) return value;
  const int half = rotary_dim / 2;
  const bool is_first = kStyle == RopeStyle::kInterleaved ? dim % 2 == 0 : dim < half;
  const int pair = kStyle == RopeStyle::kInterleaved ? dim / 2 : is_first ? dim : dim - half;
  const int distance = kStyle == RopeStyle::kInterleaved ? 1 : half;
  const float partner = element(x[is_first ? dim + distance : dim - distance]);
  const float sine = cos_sin[half + pair];
  return value * cos_sin[pair] + partner * (is_first ? -sine : sine);
}

}  // namespace kernelcat
