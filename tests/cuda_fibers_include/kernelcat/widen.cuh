// kernels/cuda/include/kernelcat/widen.cuh on the host: products of pairs.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

template <typename T>
constexpr bool kIsBfloat16 = false;
template <>
constexpr bool kIsBfloat16<bfloat16> = true;

template <typename T>
uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  T left[2], right[2];
  std::memcpy(left, &a, 4);
  std::memcpy(right, &b, 4);
  return pack<T>(to_float(left[0]) * to_float(right[0]), to_float(left[1]) * to_float(right[1]));
}

}  // namespace kernelcat
