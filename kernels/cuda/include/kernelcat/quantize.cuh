// Quantization of a block of values that share a scale. With amax the largest magnitude of the
// block, the scale is amax / 448, and a value becomes e4m3(value * (448 / amax)); every operation
// rounds to nearest.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

constexpr float kMinAmax = 1e-10f;  // keeps 448 / amax of a block of zeros finite

__device__ __forceinline__ float scale_of(float amax) {
  return __fdiv_rn(amax, kE4m3Max);
}

// The factor that values are multiplied by, the reciprocal of the scale.
__device__ __forceinline__ float inverse_of(float amax) {
  return __fdiv_rn(kE4m3Max, amax);
}

__device__ __forceinline__ float8_e4m3fn quantized(float value, float inverse) {
  return float8_e4m3fn(__fmul_rn(value, inverse));
}

// The maximum over the lanes of a warp; every lane returns it.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

constexpr int kVector = 8;  // 16-bit elements in 16 bytes

// The first `count` elements at `x`, at most kVector, and zeros after them.
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
