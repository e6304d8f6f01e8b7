// The element type float8_e4m3fn: 4 exponent bits, 3 mantissa bits, at most 448, no infinity.
#pragma once

#include <cuda_fp8.h>

#include <kernelcat/types.cuh>

namespace kernelcat {

using float8_e4m3fn = __nv_fp8_e4m3;

constexpr float kE4m3Max = 448.0f;

// Columns of A and B, and rows of B, that share a scale.
constexpr int kScaleBlock = 128;

__device__ __forceinline__ float to_float(float8_e4m3fn value) {
  return static_cast<float>(value);
}

// Two values as e4m3, rounded to nearest even and saturated; `low` lies at the lower address. One
// instruction from sm_89 on, integer arithmetic before.
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace kernelcat
