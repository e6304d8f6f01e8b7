// kernels/cuda/include/kernelcat/softmax.cuh on the host: the exponential and constants.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

inline float fast_exp2(float x) {
  return std::exp2(x);
}

}  // namespace kernelcat
