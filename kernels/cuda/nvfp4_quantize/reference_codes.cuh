// Reference: the scale and the codes of a block in the plainest arithmetic. The naive kernel runs
// these definitions. The other kernels run faster twins, in quick_scaling.cuh and codes.cuh, which
// give the same bits: every kernel is compared with the oracle bit by bit.
#pragma once

#include <kernelcat/fp4.cuh>

namespace kernelcat {

constexpr float kE2m1Max = 6.0f;
constexpr uint32_t kInfinityBits = 0x7f800000;
// The bias of a float's exponent less that of E4M3's, 127 - 7, in the exponent field of a float.
constexpr uint32_t kE4m3Bias = 120u << 23;

// The code of a block's scale, and the factor that the block's elements are multiplied by.
struct BlockScale {
  uint32_t code;
  float inverse;
};

// `of(amax)` is the scale of a block whose largest magnitude is `amax`, which is not NaN; kNan is
// the code of a scale that is NaN.
template <bool kNvfp4>
struct Scaling;

template <>
struct Scaling<true> {
  static constexpr uint32_t kNan = 0x7f;
  float global_scale, per_six;

  // `global` (1,).
  __device__ __forceinline__ explicit Scaling(const float* global)
      : global_scale(*global), per_six(__frcp_rn(__fmul_rn(kE2m1Max, *global))) {}

  // A scale is never subnormal, so rounding to E4M3 is rounding the bits of a float.
  __device__ __forceinline__ BlockScale of(float amax) const {
    const float wanted = fminf(fmaxf(__fmul_rn(amax, per_six), 0x1p-6f), 448.0f);
    const uint32_t bits = __float_as_uint(wanted);
    const uint32_t code = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    const float scale = __uint_as_float(code << 20);
    return {code - (kE4m3Bias >> 20), __frcp_rn(__fmul_rn(scale, global_scale))};
  }
};

template <>
struct Scaling<false> {
  static constexpr uint32_t kNan = 0xff;

  __device__ __forceinline__ explicit Scaling(const float*) {}

  __device__ __forceinline__ BlockScale of(float amax) const {
    const uint32_t power = min(__float_as_uint(amax), kInfinityBits - 1) >> 23;
    const uint32_t code = max(power, 2u) - 2;
    return {code, __uint_as_float((254 - code) << 23)};
  }
};

// The larger magnitude; NaN if one of the two values is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
}

// The signs of eight values in the sign bits of their codes: bit 4 i + 3 is that of value i.
__device__ __forceinline__ uint32_t code_signs(const float (&h)[kWordCodes]) {
  const auto high_bytes = [&](int first) {  // of values first, first + 2, first + 4, first + 6
    const auto word = [&](int i) { return __float_as_uint(h[first + i]); };
    return __byte_perm(__byte_perm(word(0), word(2), 0x73), __byte_perm(word(4), word(6), 0x73),
                       0x5410);
  };
  return (high_bytes(1) & 0x80808080) | (high_bytes(0) >> 4 & 0x08080808);
}

// The codes of eight values times `inverse`, rounded to nearest, ties to even, saturating. `amax`
// is the largest magnitude of the block; where `amax` or a product is NaN, the codes are undefined.
template <bool kNvfp4>
__device__ __forceinline__ uint32_t nearest_codes(const float (&h)[kWordCodes], float inverse,
                                                  float amax) {
  float size[kWordCodes];
#pragma unroll
  for (int i = 0; i < kWordCodes; ++i) size[i] = __fmul_rn(fabsf(h[i]), inverse);
  // The rounding below is right for sizes under 7. NVFP4's sizes reach 7 only in blocks whose scale
  // saturates.
  if (!kNvfp4 || !(__fmul_rn(amax, inverse) < 7.0f)) {
#pragma unroll
    for (int i = 0; i < kWordCodes; ++i) size[i] = fminf(size[i], kE2m1Max);
  }
  // A size x has the code 2 x, x + 2 or x / 2 + 4, rounded to an integer, in three ranges of x;
  // everywhere the right one is the smallest of the three. Added to 2^23 each is exact up to one
  // rounding, and the last bits of the sum are the code.
  constexpr float kWhole = 0x1p23f;
  uint32_t codes = 0;
#pragma unroll
  for (int i = kWordCodes - 1; i >= 0; --i) {
    const float code = fminf(fminf(fmaf(size[i], 2.0f, kWhole), __fadd_rn(size[i], kWhole + 2)),
                             fmaf(size[i], 0.5f, kWhole + 4));
    codes = codes * 16 + __float_as_uint(code);
  }
  // The bits of 2^23 that the last two sums left in the word; those of earlier sums were shifted
  // out.
  constexpr uint32_t kExcess = 0x4b000000u * 0x11u;
  return (codes - kExcess) | code_signs(h);
}

// The codes of eight values times `inverse`, rounded stochastically and saturating; `h` becomes the
// products. `random` has 16 random bits for each element, two elements in a word, the first low.
__device__ __forceinline__ uint32_t random_codes(float (&h)[kWordCodes], float inverse,
                                                 const uint4& random) {
  const uint32_t words[4] = {random.x, random.y, random.z, random.w};
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kWordCodes; ++i) {
    h[i] = __fmul_rn(h[i], inverse);
    const float size = fminf(fabsf(h[i]), kE2m1Max);
    const bool is_small = size < 1.0f;
    const uint32_t bits = __float_as_uint(is_small ? __fadd_rn(size, 1.0f) : size);
    const uint32_t chance = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
    const uint32_t code = ((bits + (chance << 6)) >> 22) - (is_small ? 254 : 252);
    codes |= (code | (__float_as_uint(h[i]) >> 28 & 8)) << 4 * i;
  }
  return codes;
}

}  // namespace kernelcat
