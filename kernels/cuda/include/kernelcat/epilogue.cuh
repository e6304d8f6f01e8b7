// What happens to a sum of products before it is rounded, in float32.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// kSwiglu makes one column of each pair of columns, gate and up: silu(gate) * up.
enum class Activation { kNone, kSilu, kGelu, kSwiglu };

// x * sigmoid(x). Where exp(-x) overflows the quotient is zero, as it should be.
__device__ __forceinline__ float silu(float x) {
  return __fdividef(x, 1.0f + __expf(-x));
}

__device__ __forceinline__ float gelu(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678f));
}

// The activation of one column; not for kSwiglu.
template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu) return silu(x);
  if constexpr (kActivation == Activation::kGelu) return gelu(x);
  return x;
}

}  // namespace kernelcat
