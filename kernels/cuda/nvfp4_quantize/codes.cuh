// Sixteen float32 values to E2M1 codes in two words: to nearest, or with chance.
#pragma once

#include <kernelcat/fp4.cuh>

namespace kernelcat {

constexpr int kWord = 8;  // codes in a word
constexpr int kVector = 2 * kWord;

using Values = float[2][kWord];

// `nearest_codes` of both halves with one minimum of three integers an element, for minima run at
// half the rate of sums: floats that are not negative are ordered as their bits are.
__device__ __forceinline__ uint2 nearest_codes_by_integers(const Values& h, float inverse,
                                                           bool saturates) {
  const uint32_t signs[2] = {code_signs(h[0]), code_signs(h[1])};
  Values size;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    size[i / kWord][i % kWord] = __fmul_rn(fabsf(h[i / kWord][i % kWord]), inverse);
  }
  if (saturates) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      size[i / kWord][i % kWord] = fminf(size[i / kWord][i % kWord], kE2m1Max);
    }
  }
  constexpr float kWhole = 0x1p23f;
  constexpr uint32_t kAhead = 0x4b000000u * 0x11u;  // 2^23, of the first two
  uint32_t codes[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = kWord - 1; i >= 0; --i) {
      const float own = size[half][i];
      const uint32_t least = __vimin3_u32(__float_as_uint(fmaf(own, 2.0f, kWhole)),
                                          __float_as_uint(__fadd_rn(own, kWhole + 2)),
                                          __float_as_uint(fmaf(own, 0.5f, kWhole + 4)));
      codes[half] = codes[half] * 16 + least;
    }
    codes[half] = (codes[half] - kAhead) | signs[half];
  }
  return {codes[0], codes[1]};
}

// Halves with the signs of `pair` and magnitudes of those of `most` at most.
__device__ __forceinline__ uint32_t clamp_magnitudes(uint32_t pair, uint32_t most) {
  uint32_t result;
#if __CUDA_ARCH__ >= 860
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(most));
#else
  asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair & 0x7fff7fff), "r"(most));
  result |= pair & 0x80008000;
#endif
  return result;
}

// Eight codes with chance: 2^-14 times a value is a float16 with its code in bits 9 to 11, to which
// nine random bits are added below it. `inverse` is 2^-14 of what values are multiplied by.
__device__ __forceinline__ uint32_t random_codes_by_halves(const float (&h)[kWord], float inverse,
                                                           const uint2& random) {
  constexpr uint32_t kMost = 0x0e000e00;              // code 7, twice
  const auto positions = [&](int i, uint32_t word) {  // of values i and i + 2
    const uint32_t pair = pack<float16>(h[i] * inverse, h[i + 2] * inverse);
    return clamp_magnitudes(pair, kMost) + (word & 0x01ff01ff);
  };
  // A byte's bits are the sign, three zeros, the code, and one below it.
  const uint32_t even = __byte_perm(positions(0, random.x), positions(4, random.y), 0x7531);
  const uint32_t odd =
      __byte_perm(positions(1, random.x >> 7), positions(5, random.y >> 7), 0x7531);
  const uint32_t codes = (even >> 1 & 0x0f0f0f0f) | (odd << 3 & 0xf0f0f0f0);
  const uint32_t signs = (even >> 4 & 0x0f0f0f0f) | (odd & 0xf0f0f0f0);
  return codes | (signs & 0x88888888);
}

}  // namespace kernelcat
