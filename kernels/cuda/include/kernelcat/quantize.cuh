// Quantizing a block of values that share a scale: the scale is amax / 448, and a value becomes
// e4m3(value * (448 / amax)), every operation rounded to nearest.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

constexpr float kLeastAmax = 1e-10f;  // keeps the scale of a block of zeros finite

__device__ __forceinline__ float scale_of(float amax) {
  return __fdiv_rn(amax, kE4m3Max);
}

// What values are multiplied by.
__device__ __forceinline__ float inverse_of(float amax) {
  return __fdiv_rn(kE4m3Max, amax);
}

__device__ __forceinline__ float8_e4m3fn quantized(float value, float inverse) {
  return float8_e4m3fn(__fmul_rn(value, inverse));
}

// The maximum over the lanes of a warp, which all get it.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

constexpr int kVector = 8;  // 16-bit elements in 16 bytes

// The `count` elements at `x` (up to 8, where they are not a whole vector), zeros after them.
template <typename T>
__device__ __forceinline__ uint4 load_elements(const T* x, int count) {
  uint4 vector = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) reinterpret_cast<T*>(&vector)[i] = x[i];
  }
  return vector;
}

}  // namespace kernelcat
