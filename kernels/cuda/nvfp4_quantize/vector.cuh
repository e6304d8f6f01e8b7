// Sixteen neighbours of a row in a thread, from 16 bits to codes: a block of NVFP4, half of
// MXFP4's.
#pragma once

#include "codes.cuh"
#include "options.cuh"
#include "quick_scaling.cuh"

namespace kernelcat {

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

// Values times signs: bfloat16's bits get theirs as they move into place.
template <typename T>
__device__ __forceinline__ void widen(const Vector& vector, const float (&signs)[kVector],
                                      Values& h) {
  widen<T>(vector, h);
#pragma unroll
  for (int i = 0; i < kVector; ++i) h[i / kWord][i % kWord] *= signs[i];
}
template <>
__device__ __forceinline__ void widen<bfloat16>(const Vector& vector, const float (&signs)[kVector],
                                                Values& h) {
  const auto sign = [&](int i) { return __float_as_uint(signs[i]) & 0x80000000; };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = vector.halves[half];
    const uint32_t pairs[kWord / 2] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kWord; i += 2) {
      const uint32_t pair = pairs[i / 2];
      h[half][i] = __uint_as_float(pair * 0x10000 + sign(half * kWord + i));
      h[half][i + 1] = __uint_as_float((pair & 0xffff0000) ^ sign(half * kWord + i + 1));
    }
  }
}

// Four times the transform, whose last round is between the halves.
__device__ __forceinline__ void rotate(Values& h) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
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

// What options read, once a thread.
template <bool kRotated, bool kStochastic>
struct Options {
  float signs[kVector];  // of the transform
  uint32_t key[2];       // of random rounding

  __device__ __forceinline__ Options(const float* all_signs, const uint32_t* seed) {
    if constexpr (kRotated) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(all_signs + i);
        signs[i] = four.x;
        signs[i + 1] = four.y;
        signs[i + 2] = four.z;
        signs[i + 3] = four.w;
      }
    }
    if constexpr (kStochastic) {
      key[0] = seed[0];
      key[1] = seed[1];
    }
  }
};

// A vector's codes, and its block's scale.
struct Coded {
  uint2 codes;
  uint32_t scale;
};

// Of vector `index` of the whole matrix, one a lane, whose largest magnitude is `amax`; all lanes
// of a warp must call it together.
template <bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ Coded
coded_values(const Options<kRotated, kStochastic>& options,
             const QuickScaling<kNvfp4, kRotated, kStochastic>& scaling, const Values& h,
             float amax, int64_t index) {
#pragma unroll
  for (int mask = 1; mask < kScaleLanes<kNvfp4>; mask *= 2) {
    amax = larger_magnitude(amax, __shfl_xor_sync(0xffffffff, amax, mask));
  }
  const BlockScale found = scaling.of(amax);
  uint2 codes;
  if constexpr (kStochastic) {
    const uint4 random = philox(options.key[0], options.key[1], index);
    codes = {random_codes_by_halves(h[0], found.inverse, {random.x, random.y}),
             random_codes_by_halves(h[1], found.inverse, {random.z, random.w})};
  } else {
    codes = nearest_codes_by_integers(h, found.inverse, scaling.saturates(found.code));
  }
  if (amax != amax) codes = {0, 0};
  return {codes, found.code};
}

// Of a vector as it is stored.
template <typename T, bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ Coded coded(const Options<kRotated, kStochastic>& options,
                                       const QuickScaling<kNvfp4, kRotated, kStochastic>& scaling,
                                       const Vector& vector, int64_t index) {
  Values h;
  float amax;
  if constexpr (kRotated) {
    widen<T>(vector, options.signs, h);
    rotate(h);
    amax = magnitude(h);
  } else {
    widen<T>(vector, h);
    amax = magnitude<T>(vector);
  }
  return coded_values(options, scaling, h, amax, index);
}

}  // namespace kernelcat
