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

// Of a code's place, 4 i + 3, the sign of value i.
__device__ __forceinline__ uint32_t code_signs(const float (&h)[8]) {
  const auto high_bytes = [&](int first) {  // of every second value
    const auto word = [&](int i) { return __float_as_uint(h[first + i]); };
    return __byte_perm(__byte_perm(word(0), word(2), 0x73), __byte_perm(word(4), word(6), 0x73),
                       0x5410);
  };
  return (high_bytes(1) & 0x80808080) | (high_bytes(0) >> 4 & 0x08080808);
}

// Eight codes in a word, of h times `inverse`, to nearest, ties to even, saturating. `amax` is the
// largest magnitude of the block; if it is NaN, or a product is, codes are any.
template <bool kNvfp4>
__device__ __forceinline__ uint32_t nearest_codes(const float (&h)[8], float inverse, float amax) {
  float size[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) size[i] = __fmul_rn(fabsf(h[i]), inverse);
  // From 7 on; of NVFP4 only in blocks whose scale saturates.
  if (!kNvfp4 || !(__fmul_rn(amax, inverse) < 7.0f)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) size[i] = fminf(size[i], kE2m1Max);
  }
  // Codes are whole at 2 x, x + 2 and x / 2 + 4, of which the least is the right one and exact up
  // to one rounding: the sum with 2^23, whose last bits are the code.
  constexpr float kWhole = 0x1p23f;
  uint32_t codes = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float least = fminf(fminf(fmaf(size[i], 2.0f, kWhole), __fadd_rn(size[i], kWhole + 2)),
                              fmaf(size[i], 0.5f, kWhole + 4));
    codes = codes * 16 + __float_as_uint(least);
  }
  constexpr uint32_t kAhead = 0x4b000000u * 0x11u;  // 2^23, of the first two
  return (codes - kAhead) | code_signs(h);
}

// The same with chance: 16 random bits an element, a pair of elements in a word, the first low.
__device__ __forceinline__ uint32_t random_codes(float (&h)[8], float inverse,
                                                 const uint4& random) {
  const uint32_t words[4] = {random.x, random.y, random.z, random.w};
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    h[i] = __fmul_rn(h[i], inverse);
    const float size = fminf(fabsf(h[i]), kE2m1Max);
    const bool small = size < 1.0f;
    const uint32_t bits = __float_as_uint(small ? __fadd_rn(size, 1.0f) : size);
    const uint32_t chance = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
    const uint32_t code = ((bits + (chance << 6)) >> 22) - (small ? 254 : 252);
    codes |= (code | (__float_as_uint(h[i]) >> 28 & 8)) << 4 * i;
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
