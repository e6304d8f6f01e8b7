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

// What a sum of exponentials relative to `most` is multiplied by to be relative to `new_most`,
// which is no less; both are -infinity before anything was seen.
__device__ __forceinline__ float rescale(float most, float new_most) {
  return most == -kInfinity ? 0.0f : fast_exp2(most - new_most);
}

// What is left to do for a row whose keys have all been seen: `most` is the largest score in base
// 2, `total` the sum of the exponentials relative to it. A sink adds to the sum, but no value.
struct RowEnd {
  float factor;  // of the row's sum of values
  float lse;

  static __device__ __forceinline__ RowEnd of(float most, float total) {
    if (total == 0.0f) return {0.0f, -kInfinity};
    return {1.0f / total, kLn2 * (most + log2f(total))};
  }

  static __device__ __forceinline__ RowEnd with_sink(float most, float total, float sink) {
    sink *= kLog2E;
    const float new_most = fmaxf(most, sink), weight = rescale(most, new_most);
    const RowEnd end = of(new_most, total * weight + fast_exp2(sink - new_most));
    return {end.factor * weight, end.lse};
  }
};

}  // namespace kernelcat
