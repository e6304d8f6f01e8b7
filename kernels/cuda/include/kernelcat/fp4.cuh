// NVFP4 and MXFP4: E2M1 codes in pairs (the first in a byte's low half), E4M3 or E8M0 scales of 16
// or 32 neighbours, and the order of scales. Floats are put together by integers, which any
// architecture has. reference/_fp4.py says what is what.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

template <bool kNvfp4>
constexpr int kFp4Block = kNvfp4 ? 16 : 32;  // elements that share a scale

constexpr float kE2m1Max = 6.0f;
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kE4m3Bias = 120u << 23;  // what a float's exponent is ahead of e4m3's, in place

// Where the scale of (row, col) lies, of `num_cols` a row; swizzled: cuBLASLt's tiles of 128 x 4.
template <bool kSwizzled>
__device__ __forceinline__ int64_t scale_place(int64_t row, int64_t col, int64_t num_cols) {
  if constexpr (!kSwizzled) return row * num_cols + col;
  const int64_t tile = row / 128 * ceil_div<int64_t>(num_cols, 4) + col / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + col % 4;
}

// A block's scale as a byte, and what its elements are multiplied by.
struct BlockScale {
  uint32_t code;
  float inverse;
};

// Of blocks with the largest element `amax`, whose scale is NaN where that is.
template <bool kNvfp4>
struct Scaling;

template <>
struct Scaling<true> {
  static constexpr uint32_t kNan = 0x7f;
  float global_scale, per_six;

  __device__ __forceinline__ explicit Scaling(const float* global)
      : global_scale(*global), per_six(__frcp_rn(__fmul_rn(kE2m1Max, *global))) {}

  // Never subnormal, so that rounding is that of a float's bits.
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

// The larger magnitude, NaN if one is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
}

// Eight codes in a word, to nearest, ties to even, saturating. Of NaN any.
__device__ __forceinline__ uint32_t nearest_codes(const float (&y)[8]) {
  uint32_t codes = 0, signs = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float size = fminf(fabsf(y[i]), kE2m1Max);
    // 1, 2 or 4; adding it 2^22 times leaves the step of codes there: 0.5, 1 or 2. What is in the
    // last bits of the sum is a multiple of that step.
    const uint32_t power = __float_as_uint(fmaxf(size, 1.0f)) & kInfinityBits;
    const float sum = fmaf(__uint_as_float(power), 0x1p22f, size);
    codes += (__float_as_uint(sum) + (power >> 22) - power) << 4 * i;
    signs |= __float_as_uint(y[i]) >> (28 - 4 * i) & 8u << 4 * i;
  }
  constexpr uint32_t kAhead = (22u << 23) + 254;  // of each code
  return (codes - kAhead * 0x11111111u) | signs;
}

// The same with chance: 16 random bits an element, a pair of elements in a word, the first low.
__device__ __forceinline__ uint32_t random_codes(const float (&y)[8], const uint4& random) {
  const uint32_t words[4] = {random.x, random.y, random.z, random.w};
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float size = fminf(fabsf(y[i]), kE2m1Max);
    const bool small = size < 1.0f;
    const uint32_t bits = __float_as_uint(small ? __fadd_rn(size, 1.0f) : size);
    const uint32_t chance = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
    const uint32_t code = ((bits + (chance << 6)) >> 22) - (small ? 254 : 252);
    codes |= (code | (__float_as_uint(y[i]) >> 28 & 8)) << 4 * i;
  }
  return codes;
}

// Float of a scale's byte: NaN for the codes that mean it, subnormals as they are.
template <bool kNvfp4>
__device__ __forceinline__ float scale_value(uint32_t code) {
  if constexpr (kNvfp4) {
    const float tiny = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20);
    return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fffffff) : tiny * 0x1p120f;
  } else {
    if (code == 0xff) return __uint_as_float(0x7fffffff);
    return __uint_as_float(code == 0 ? 1u << 22 : code << 23);
  }
}

// Value i of eight codes in a word.
__device__ __forceinline__ float code_value(uint32_t codes, int i) {
  const uint32_t code = codes >> 4 * i;
  // The code's place in a float makes it 2^-126 of its value, 0.5 (a subnormal) included.
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

}  // namespace kernelcat
