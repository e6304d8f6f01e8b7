// Float32 arithmetic in one instruction each, without the range checks of CUDA's functions.
#pragma once

namespace kernelcat {

// 1 / x; subnormal results are zero.
__device__ __forceinline__ float quick_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The smaller or the larger one; NaN if either is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace kernelcat
