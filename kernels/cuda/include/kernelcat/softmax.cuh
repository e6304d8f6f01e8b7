// Softmax in base 2: scores are multiplied by log2(e), so that an exponential is one instruction.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The factor that makes sums of exponentials relative to `row_max` relative to `new_row_max`, which
// is not smaller. Both are -infinity while a row has no visible key: the factor is then 0.
__device__ __forceinline__ float rescale_factor(float row_max, float new_row_max) {
  return row_max == -kInfinity ? 0.0f : fast_exp2(row_max - new_row_max);
}

// What completes a row after its last key. `row_max` is the largest score in base 2, `row_sum` the
// sum of the exponentials relative to it. A sink adds an exponential to the sum, but no value.
struct RowEnd {
  float factor;  // output = accumulator * factor
  float lse;     // log-sum-exp, natural

  static __device__ __forceinline__ RowEnd of(float row_max, float row_sum) {
    if (row_sum == 0.0f) return {0.0f, -kInfinity};
    return {1.0f / row_sum, kLn2 * (row_max + log2f(row_sum))};
  }

  static __device__ __forceinline__ RowEnd with_sink(float row_max, float row_sum, float sink) {
    sink *= kLog2E;
    const float new_max = fmaxf(row_max, sink), weight = rescale_factor(row_max, new_max);
    const RowEnd end = of(new_max, row_sum * weight + fast_exp2(sink - new_max));
    return {end.factor * weight, end.lse};
  }
};

}  // namespace kernelcat
