// Float8 and NVFP4 values as pairs of bfloat16 or float16, by integer arithmetic on their bits.
#pragma once

#include <kernelcat/nvfp4_cache.cuh>

namespace kernelcat {

template <typename T>
constexpr bool kIsBfloat16 = false;
template <>
constexpr bool kIsBfloat16<bfloat16> = true;

// The products of two pairs of T. sm_80 multiplies bfloat16 only by fma; -0 as the addend keeps the
// sign of a zero.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (kIsBfloat16<T>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

// Two e4m3 values as a pair of T, exactly (NaN becomes 480). kSelector is that of prmt: it moves
// the two bytes of `word` to the high bytes of the pair, above zeros (byte 4 of prmt's operands).
// Then sign, exponent and mantissa are moved to T's positions, and one multiplication makes up for
// the difference between the exponents' biases.
template <typename T, uint32_t kSelector>
__device__ __forceinline__ uint32_t widen(uint32_t word) {
  constexpr int kShift = kIsBfloat16<T> ? 4 : 1;
  const uint32_t high = __byte_perm(word, 0, kSelector);
  const uint32_t bits = (high & 0x80008000) | ((high & 0x7f007f00) >> kShift);
  return multiply_pairs<T>(bits, kIsBfloat16<T> ? 0x7b807b80 : 0x5c005c00);  // 2^120, 2^8
}

// Widened NVFP4 values times widened scales are the real values / kNvfp4Factor. T has room for
// scales times 2^119 (bfloat16) or 2^7 (float16), and E2M1 bits at T's positions mean 2^-126 or
// 2^-14 times their value.
constexpr float kNvfp4Factor = 0x1p7f;

// Two scales, which are the high bytes of the halves of `bytes`, for widen_values. NaN becomes 480.
template <typename T>
__device__ __forceinline__ uint32_t widen_scales(uint32_t bytes) {
  if constexpr (kIsBfloat16<T>) {
    const uint32_t bits = (bytes & 0x7f007f00) >> 4;                            // scales * 2^-120
    return multiply_pairs<T>(multiply_pairs<T>(bits, 0x7b807b80), 0x7b007b00);  // * 2^120 * 2^119
  } else {
    return multiply_pairs<T>((bytes & 0x7f007f00) >> 1, 0x78007800);  // scales * 2^-8 * 2^15
  }
}

// Eight values times a pair of scales, exactly: pairs[i] has values i and i + 4 of `word`.
template <typename T>
__device__ __forceinline__ void widen_values(uint32_t (&pairs)[4], uint32_t word, uint32_t scales) {
  constexpr int kShift = kIsBfloat16<T> ? 6 : 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t high = word << (12 - 4 * i);  // the codes are the highest bits of the halves
    const uint32_t bits = (high & 0x80008000) | ((high & 0x70007000) >> kShift);
    pairs[i] = multiply_pairs<T>(bits, scales);
  }
}

}  // namespace kernelcat
