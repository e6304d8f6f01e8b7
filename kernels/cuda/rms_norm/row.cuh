// What the kernels of rms_norm share: formats of the result, and the arithmetic of an element.
// reference/rms_norm.py defines both.
#pragma once

#include <kernelcat/pairwise_sum.cuh>
#include <kernelcat/quantize.cuh>

#include "../nvfp4_quantize/reference_codes.cuh"

namespace kernelcat {

enum class OutFormat { kSame, kFp8, kNvfp4 };

// x + residual, rounded to T.
template <typename T>
__device__ __forceinline__ T add_rounded(T x, T residual) {
  return from_float<T>(__fadd_rn(to_float(x), to_float(residual)));
}

// 1 / sqrt(sum / n + eps), where `sum` is that of the squares of a row of n elements.
__device__ __forceinline__ float inverse_rms(float sum, int n, float eps) {
  const float mean = __fadd_rn(__fdiv_rn(sum, static_cast<float>(n)), eps);
  return __frcp_rn(__fsqrt_rn(mean));
}

__device__ __forceinline__ float normalized(float h, float rstd, float weight) {
  return __fmul_rn(__fmul_rn(h, rstd), weight);
}

}  // namespace kernelcat
