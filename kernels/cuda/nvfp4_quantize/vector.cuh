// Eight neighbours of a row in a thread, from 16 bits to codes; neighbouring threads share a block.
#pragma once

#include "options.cuh"

namespace kernelcat {

template <bool kNvfp4>
constexpr int kScaleLanes = kFp4Block<kNvfp4> / kVector;  // that share a scale

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
__device__ __forceinline__ void widen(const uint4& vector, float (&h)[kVector]) {
  const uint32_t pairs[kVector / 2] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 both = widen_pair<T>(pairs[i]);
    h[2 * i] = both.x;
    h[2 * i + 1] = both.y;
  }
}

// The transform of the 16 elements that a lane and its neighbour have.
__device__ __forceinline__ void rotate(float (&h)[kVector], const float* signs) {
  const bool is_second = lane_index() % 2;
  const float4* own = reinterpret_cast<const float4*>(signs) + 2 * is_second;
  const float4 low = own[0], high = own[1];
  const float sign[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) h[i] *= sign[i];
  butterflies<1>(h);
  butterflies<2>(h);
  butterflies<4>(h);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float other = __shfl_xor_sync(0xffffffff, h[i], 1);
    h[i] = 0.25f * (is_second ? __fsub_rn(other, h[i]) : __fadd_rn(h[i], other));
  }
}

// A vector's codes, and its block's scale.
struct Coded {
  uint32_t codes, scale;
};

// Of vector `index` of the whole matrix, one a lane; all lanes of a warp must call it together.
template <bool kNvfp4, bool kRotated, bool kStochastic, typename T>
__device__ __forceinline__ Coded coded(const Arrays<T>& arrays, const Scaling<kNvfp4>& scaling,
                                       float (&h)[kVector], int64_t index) {
  if constexpr (kRotated) rotate(h, arrays.signs);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) amax = larger_magnitude(amax, h[i]);
#pragma unroll
  for (int mask = 1; mask < kScaleLanes<kNvfp4>; mask *= 2) {
    amax = larger_magnitude(amax, __shfl_xor_sync(0xffffffff, amax, mask));
  }
  const bool is_nan = amax != amax;
  const BlockScale found = scaling.of(is_nan ? 0.0f : amax);
  uint32_t codes;
  if constexpr (kStochastic) {
    codes = random_codes(h, found.inverse, philox(arrays.seed[0], arrays.seed[1], index));
  } else {
    codes = nearest_codes<kNvfp4>(h, found.inverse, amax);
  }
  return {is_nan ? 0 : codes, is_nan ? scaling.kNan : found.code};
}

}  // namespace kernelcat
