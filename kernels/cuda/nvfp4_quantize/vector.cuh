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

// The transform, whose last round is between the halves.
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
    h[0][i] = 0.25f * __fadd_rn(first, second);
    h[1][i] = 0.25f * __fsub_rn(first, second);
  }
}

// A vector's codes, and its block's scale.
struct Coded {
  uint2 codes;
  uint32_t scale;
};

// Of vector `index` of the whole matrix, one a lane; all lanes of a warp must call it together.
template <bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ Coded coded(const Options& options, const Scaling<kNvfp4>& scaling,
                                       Values& h, int64_t index) {
  if constexpr (kRotated) rotate(h, options.signs);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) amax = larger_magnitude(amax, h[i / kWord][i % kWord]);
#pragma unroll
  for (int mask = 1; mask < kScaleLanes<kNvfp4>; mask *= 2) {
    amax = larger_magnitude(amax, __shfl_xor_sync(0xffffffff, amax, mask));
  }
  const bool is_nan = amax != amax;
  const BlockScale found = scaling.of(is_nan ? 0.0f : amax);
  uint32_t codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kStochastic) {
      const uint4 random = philox(options.seed[0], options.seed[1], 2 * index + half);
      codes[half] = random_codes(h[half], found.inverse, random);
    } else {
      codes[half] = nearest_codes<kNvfp4>(h[half], found.inverse, amax);
    }
    if (is_nan) codes[half] = 0;
  }
  return {{codes[0], codes[1]}, is_nan ? scaling.kNan : found.code};
}

}  // namespace kernelcat
