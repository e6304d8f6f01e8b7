// Float8 keys and values as float16, one instruction a pair (sm_89+), and bfloat16 queries scaled
// to float16 so that both have one type.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// The two e4m3 values in the low bytes of `bytes` as a pair of float16.
__device__ __forceinline__ uint32_t e4m3_to_float16(uint32_t bytes) {
  uint32_t pair;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
}

// Turns a row of bfloat16 queries, which four neighbouring lanes share, into float16. Divides the
// row by the power of two that leaves its largest magnitude between 1 and 2, and returns that
// power.
template <int kSteps>
__device__ __forceinline__ float scale_to_float16(uint32_t (&words)[kSteps][2]) {
  uint32_t max_bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const uint32_t word = words[i / 2][i % 2];
    max_bits = max(max_bits, max(word & 0x7fff, word >> 16 & 0x7fff));
  }
  max_bits = max(max_bits, __shfl_xor_sync(0xffffffff, max_bits, 1));
  max_bits = max(max_bits, __shfl_xor_sync(0xffffffff, max_bits, 2));
  // The bounds keep the power and its inverse normal numbers. Infinity and NaN stay what they are.
  const uint32_t exponent = min(max(max_bits >> 7, 1u), 253u);
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
