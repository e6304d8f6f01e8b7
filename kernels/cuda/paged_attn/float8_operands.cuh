// Float8 keys and values become float16, by one instruction a pair, and bfloat16 queries with them.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Two e4m3 values, the low bytes of `bytes`, as float16.
__device__ __forceinline__ uint32_t float8_pair(uint32_t bytes) {
  uint32_t pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
}

// Of a row of queries that four lanes share, bfloat16 to float16: divided by the power of two that
// is given back, and that leaves the largest between 1 and 2.
template <int kSteps>
__device__ __forceinline__ float fit_float16(uint32_t (&words)[kSteps][2]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const uint32_t word = words[i / 2][i % 2];
    largest = max(largest, max(word & 0x7fff, word >> 16 & 0x7fff));
  }
  largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 2));
  // Both powers are normal numbers; an infinity or NaN stays what it is.
  const uint32_t exponent = min(max(largest >> 7, 1u), 253u);
  const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    uint32_t& word = words[i / 2][i % 2];
    word = pack<float16>(__uint_as_float(word << 16) * inverse,
                         __uint_as_float(word & 0xffff0000) * inverse);
  }
  return __uint_as_float(exponent << 23);
}

}  // namespace kernelcat
