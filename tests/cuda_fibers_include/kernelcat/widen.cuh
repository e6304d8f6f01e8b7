// kernels/cuda/include/kernelcat/widen.cuh on the host: products of pairs.
#pragma once

#include <kernelcat/nvfp4_cache.cuh>

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

// Two e4m3 values, the bytes that kSelector picks, as a pair of T.
template <typename T, uint32_t kSelector>
uint32_t widen(uint32_t word) {
  constexpr int kShift = kIsBfloat16<T> ? 4 : 1;
  const uint32_t high = __byte_perm(word, 0, kSelector);
  const uint32_t bits = (high & 0x80008000) | ((high & 0x7f007f00) >> kShift);
  return multiply_pairs<T>(bits, kIsBfloat16<T> ? 0x7b807b80 : 0x5c005c00);
}

constexpr float kNvfp4Factor = 0x1p7f;

// Scales times 2^119 (bfloat16) or 2^7 (float16).
template <typename T>
uint32_t widen_scales(uint32_t bytes) {
  const uint32_t magnitudes = bytes & 0x7f007f00;
  if constexpr (kIsBfloat16<T>) {
    return multiply_pairs<T>(multiply_pairs<T>(magnitudes >> 4, 0x7b807b80), 0x7b007b00);
  } else {
    return multiply_pairs<T>(magnitudes >> 1, 0x78007800);
  }
}

// Eight values times a pair of scales: pairs[i] has values i and i + 4 of `word`.
template <typename T>
void widen_values(uint32_t (&pairs)[4], uint32_t word, uint32_t scales) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t high = word << (12 - 4 * i);
    const uint32_t magnitudes = (high & 0x70007000) >> (kIsBfloat16<T> ? 6 : 3);
    pairs[i] = multiply_pairs<T>((high & 0x80008000) | magnitudes, scales);
  }
}

}  // namespace kernelcat
