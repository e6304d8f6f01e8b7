// Sixteen neighbours of a row in a thread, from 16 bits to codes: a block of NVFP4, half of
// MXFP4's.
#pragma once

#include "options.cuh"

namespace kernelcat {

constexpr int kVector = 2 * kWord;

template <bool kNvfp4>
constexpr int kScaleLanes = kFp4Block<kNvfp4> / kVector;  // that share a scale

// Elements as they are stored: 32 bytes.
struct Vector {
  uint4 halves[2];

  // Vector `index` of `all`, which others read too.
  template <typename T>
  static __device__ __forceinline__ Vector load(const T* all, int64_t index) {
    const uint4* first = reinterpret_cast<const uint4*>(all) + 2 * index;
    return {first[0], first[1]};
  }

  // The same of what nobody else reads.
  template <typename T>
  static __device__ __forceinline__ Vector load_once(const T* all, int64_t index) {
    const uint4* first = reinterpret_cast<const uint4*>(all) + 2 * index;
    return {__ldcs(first), __ldcs(first + 1)};
  }
};

using Values = float[2][kWord];

// Both elements of a word; one instruction each.
template <typename T>
__device__ __forceinline__ float2 widen_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 widen_pair<bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
template <>
__device__ __forceinline__ float2 widen_pair<float16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename T>
__device__ __forceinline__ void widen(const Vector& vector, Values& h) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = vector.halves[half];
    const uint32_t pairs[kWord / 2] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kWord / 2; ++i) {
      const float2 both = widen_pair<T>(pairs[i]);
      h[half][2 * i] = both.x;
      h[half][2 * i + 1] = both.y;
    }
  }
}

// The larger magnitudes of two pairs, NaN where one is; signs are any.
template <typename T>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t larger_magnitudes<bfloat16>(uint32_t a, uint32_t b) {
  uint32_t result;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a & 0x7fff7fff), "r"(b & 0x7fff7fff));
#endif
  return result;
}
template <>
__device__ __forceinline__ uint32_t larger_magnitudes<float16>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a & 0x7fff7fff), "r"(b & 0x7fff7fff));
  return result;
}

// The largest magnitude, NaN if one is.
template <typename T>
__device__ __forceinline__ float magnitude(const Vector& vector) {
  uint32_t pairs[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = vector.halves[half];
    pairs[half] = larger_magnitudes<T>(larger_magnitudes<T>(four.x, four.y),
                                       larger_magnitudes<T>(four.z, four.w));
  }
  const float2 both = widen_pair<T>(larger_magnitudes<T>(pairs[0], pairs[1]));
  return larger_magnitude(both.x, both.y);
}

__device__ __forceinline__ float magnitude(const Values& h) {
  float result = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) result = larger_magnitude(result, h[i / kWord][i % kWord]);
  return result;
}

// Four times the transform, whose last round is between the halves.
__device__ __forceinline__ void rotate(Values& h, const float* signs) {
  const float4* fours = reinterpret_cast<const float4*>(signs);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kWord; i += 4) {
      const float4 four = fours[(half * kWord + i) / 4];
      h[half][i] *= four.x;
      h[half][i + 1] *= four.y;
      h[half][i + 2] *= four.z;
      h[half][i + 3] *= four.w;
    }
    butterflies<1>(h[half]);
    butterflies<2>(h[half]);
    butterflies<4>(h[half]);
  }
#pragma unroll
  for (int i = 0; i < kWord; ++i) {
    const float first = h[0][i], second = h[1][i];
    h[0][i] = __fadd_rn(first, second);
    h[1][i] = __fsub_rn(first, second);
  }
}

// `nearest_codes` of both halves with one minimum of three integers an element, for minima run at
// half the rate of sums: floats that are not negative are ordered as their bits are.
template <bool kNvfp4>
__device__ __forceinline__ uint2 nearest_codes_by_integers(const Values& h, float inverse,
                                                           float amax) {
  Values size;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    size[i / kWord][i % kWord] = __fmul_rn(fabsf(h[i / kWord][i % kWord]), inverse);
  }
  if (!kNvfp4 || !(__fmul_rn(amax, inverse) < 7.0f)) {
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
    codes[half] = (codes[half] - kAhead) | code_signs(h[half]);
  }
  return {codes[0], codes[1]};
}

// `random_codes` likewise: with 22 bits below a code, it is the larger of size's bits and those of
// 1 + size, from which two codes are taken; they meet at 1.
__device__ __forceinline__ uint32_t random_codes_by_integers(const float (&h)[kWord], float inverse,
                                                             const uint4& random) {
  constexpr int kCode = 1 << 22;
  const uint32_t words[kWord / 2] = {random.x, random.y, random.z, random.w};
  uint32_t codes = 0;
#pragma unroll
  for (int i = kWord - 1; i >= 0; --i) {
    const float size = fminf(__fmul_rn(fabsf(h[i]), inverse), kE2m1Max);
    const int bits =
        __viaddmax_s32(__float_as_int(__fadd_rn(size, 1.0f)), -2 * kCode, __float_as_int(size));
    const uint32_t chance = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
    codes = codes * 16 + ((bits + (chance << 6)) / kCode);
  }
  return (codes - 252 * 0x11111111u) | code_signs(h);
}

// A vector's codes, and its block's scale.
struct Coded {
  uint2 codes;
  uint32_t scale;
};

// Of vector `index` of the whole matrix, one a lane, whose largest magnitude is `amax`; all lanes
// of a warp must call it together. Values that were rotated are four times too large, and so is
// amax.
template <bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ Coded coded_values(const Options& options,
                                              const Scaling<kNvfp4>& scaling, const Values& h,
                                              float amax, int64_t index) {
  constexpr float kShare = kRotated ? 0.25f : 1.0f;
  amax *= kShare;
#pragma unroll
  for (int mask = 1; mask < kScaleLanes<kNvfp4>; mask *= 2) {
    amax = larger_magnitude(amax, __shfl_xor_sync(0xffffffff, amax, mask));
  }
  const bool is_nan = amax != amax;
  const BlockScale found = scaling.of(is_nan ? 0.0f : amax);
  const float inverse = found.inverse * kShare;
  uint2 codes;
  if constexpr (kStochastic) {
    const auto random = [&](int half) {
      return philox(options.seed[0], options.seed[1], 2 * index + half);
    };
    codes = {random_codes_by_integers(h[0], inverse, random(0)),
             random_codes_by_integers(h[1], inverse, random(1))};
  } else {
    codes = nearest_codes_by_integers<kNvfp4>(h, inverse, amax / kShare);
  }
  if (is_nan) codes = {0, 0};
  return {codes, is_nan ? scaling.kNan : found.code};
}

// Of a vector as it is stored.
template <typename T, bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ Coded coded(const Options& options, const Scaling<kNvfp4>& scaling,
                                       const Vector& vector, int64_t index) {
  Values h;
  widen<T>(vector, h);
  if constexpr (kRotated) rotate(h, options.signs);
  const float amax = kRotated ? magnitude(h) : magnitude<T>(vector);
  return coded_values<kNvfp4, kRotated, kStochastic>(options, scaling, h, amax, index);
}

}  // namespace kernelcat
