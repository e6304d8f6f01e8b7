// Fast twins of nearest_codes() and random_codes() of reference_codes.cuh: float32 values to E2M1
// codes, rounded to nearest or stochastically.
#pragma once

#include "reference_codes.cuh"

namespace kernelcat {

constexpr int kVector = 2 * kWordCodes;  // elements of a thread

using Values = float[2][kWordCodes];

// nearest_codes() of both halves. Minima run at half the rate of sums, so the two minima of an
// element are one instruction on integers: the bits of floats that are not negative have the same
// order as the floats.
__device__ __forceinline__ uint2 nearest_codes_by_integers(const Values& h, float inverse,
                                                           bool saturates) {
  const uint32_t signs[2] = {code_signs(h[0]), code_signs(h[1])};
  Values size;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    size[i / kWordCodes][i % kWordCodes] =
        __fmul_rn(fabsf(h[i / kWordCodes][i % kWordCodes]), inverse);
  }
  if (saturates) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      size[i / kWordCodes][i % kWordCodes] = fminf(size[i / kWordCodes][i % kWordCodes], kE2m1Max);
    }
  }
  constexpr float kWhole = 0x1p23f;
  constexpr uint32_t kExcess = 0x4b000000u * 0x11u;  // as in nearest_codes()
  uint32_t codes[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = kWordCodes - 1; i >= 0; --i) {
      const float x = size[half][i];
      const uint32_t code = __vimin3_u32(__float_as_uint(fmaf(x, 2.0f, kWhole)),
                                         __float_as_uint(__fadd_rn(x, kWhole + 2)),
                                         __float_as_uint(fmaf(x, 0.5f, kWhole + 4)));
      codes[half] = codes[half] * 16 + code;
    }
    codes[half] = (codes[half] - kExcess) | signs[half];
  }
  return {codes[0], codes[1]};
}

// Two float16 values with the signs of `pair`, and magnitudes of at most those of `limit`.
__device__ __forceinline__ uint32_t clamp_magnitudes(uint32_t pair, uint32_t limit) {
  uint32_t result;
#if __CUDA_ARCH__ >= 860
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(limit));
#else
  asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair & 0x7fff7fff), "r"(limit));
  result |= pair & 0x80008000;
#endif
  return result;
}

// The codes of eight values, rounded stochastically. 2^-14 of a scaled value is a float16 that has
// the code in bits 9 to 11; nine random bits are added below the code. `inverse` is 2^-14 of the
// factor that values are multiplied by.
__device__ __forceinline__ uint32_t random_codes_by_halves(const float (&h)[kWordCodes],
                                                           float inverse, const uint2& random) {
  constexpr uint32_t kCode7 = 0x0e000e00;           // in both halves
  const auto rounded = [&](int i, uint32_t word) {  // values i and i + 2
    const uint32_t pair = pack<float16>(h[i] * inverse, h[i + 2] * inverse);
    return clamp_magnitudes(pair, kCode7) + (word & 0x01ff01ff);
  };
  // The high bytes: the sign, three zeros, the code, and the bit below the code.
  const uint32_t even = __byte_perm(rounded(0, random.x), rounded(4, random.y), 0x7531);
  const uint32_t odd = __byte_perm(rounded(1, random.x >> 7), rounded(5, random.y >> 7), 0x7531);
  const uint32_t codes = (even >> 1 & 0x0f0f0f0f) | (odd << 3 & 0xf0f0f0f0);
  const uint32_t signs = (even >> 4 & 0x0f0f0f0f) | (odd & 0xf0f0f0f0);
  return codes | (signs & 0x88888888);
}

}  // namespace kernelcat
