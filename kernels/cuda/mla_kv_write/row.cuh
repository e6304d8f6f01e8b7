// A token's row in the latent cache: its parts, its scales, and the turning of its rotated part.
#pragma once

#include <kernelcat/token_slots.cuh>

namespace kernelcat {

constexpr int kLatent = 512, kRope = 64;  // elements
constexpr int kScaled = 128;              // latent values that share a scale
constexpr int kLatentScales = kLatent / kScaled;
constexpr int kRopeAt = kLatent + 4 * kLatentScales;  // bytes before it in a packed row
constexpr float kLeast = 1e-4f;                       // of what a scale is rounded up from

template <typename Cached>
struct LatentOf {
  using Type = Cached;
};
template <>
struct LatentOf<uint8_t> {
  using Type = float8_e4m3fn;
};

// Rows of kLatent + kRope elements of Cached or, of `uint8_t`, of float8 latents, their scales and
// bfloat16.
template <typename Cached>
struct CachedRow {
  using Latent = typename LatentOf<Cached>::Type;
  static constexpr bool kPacked = sizeof(Cached) == 1;
  static constexpr int kBytes = kPacked ? kRopeAt + 2 * kRope : 2 * (kLatent + kRope);

  uint8_t* begin;

  static __device__ __forceinline__ CachedRow at(void* cache, int64_t slot) {
    return {static_cast<uint8_t*>(cache) + slot * kBytes};
  }
  __device__ __forceinline__ float* scales() const {
    return reinterpret_cast<float*>(begin + kLatent);
  }
  __device__ __forceinline__ uint8_t* rope() const {
    return begin + (kPacked ? kRopeAt : 2 * kLatent);
  }
};

// The least power of two that is no less than amax / 448 and 1e-4.
__device__ __forceinline__ float scale_of(float amax) {
  const float least = fmaxf(__fdiv_rn(amax, kE4m3Max), kLeast);
  return __uint_as_float((__float_as_uint(least) + 0x7fffff) & 0x7f800000);
}

// Of a power of two.
__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The maximum over groups of kLanes lanes, which all get it.
template <int kLanes>
__device__ __forceinline__ float max_of_lanes(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

// Elements of a pair of k_pe: side by side or 32 apart.
template <RopeStyle kStyle>
__device__ __forceinline__ int first_of_pair(int pair) {
  return kStyle == RopeStyle::kInterleaved ? 2 * pair : pair;
}
template <RopeStyle kStyle>
constexpr int kPairDistance = kStyle == RopeStyle::kInterleaved ? 1 : kRope / 2;

// Products are rounded before they are added, as the specification has it.
__device__ __forceinline__ float2 turned(float2 pair, float cosine, float sine) {
  return {__fsub_rn(__fmul_rn(pair.x, cosine), __fmul_rn(pair.y, sine)),
          __fadd_rn(__fmul_rn(pair.y, cosine), __fmul_rn(pair.x, sine))};
}

}  // namespace kernelcat
