// RowEnd (softmax.cuh) in few instructions, for where a single warp computes it at the end of a
// kernel. Logarithm and reciprocal are the hardware's, which is exact enough since the sum of a
// row, relative to its largest score, is 1 or more.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

__device__ __forceinline__ float fast_log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// `sink` is -infinity where there is none.
__device__ __forceinline__ RowEnd quick_row_end(float row_max, float row_sum, float sink) {
  const float sink_score = sink * kLog2E, new_max = fmaxf(row_max, sink_score);
  if (new_max == -kInfinity) return {0.0f, -kInfinity};
  const float weight = fast_exp2(row_max - new_max);
  const float sum = row_sum * weight + fast_exp2(sink_score - new_max);
  return {__fdividef(weight, sum), kLn2 * (new_max + fast_log2(sum))};
}

}  // namespace kernelcat
