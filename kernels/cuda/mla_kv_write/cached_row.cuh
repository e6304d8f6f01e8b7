// A row of the latent cache that is being written: where its parts lie, how latents are quantized,
// and how the rotated part is rotated.
#pragma once

#include <kernelcat/mla_row.cuh>
#include <kernelcat/token_slots.cuh>

namespace kernelcat {

constexpr float kMinScale = 1e-4f;  // before it is rounded up to a power of two

// Rows of kRowElements elements of type Cached.
template <typename Cached>
struct RowLayout {
  using Latent = Cached;
  static constexpr bool kPacked = false;
  static constexpr int kRopeAt = 2 * kLatent, kBytes = 2 * kRowElements;
};
template <>
struct RowLayout<PackedRow> {
  using Latent = float8_e4m3fn;
  static constexpr bool kPacked = true;
  static constexpr int kRopeAt = PackedRow::kRopeAt, kBytes = PackedRow::kBytes;
};

template <typename Cached>
struct CachedRow : RowLayout<Cached> {
  using Layout = RowLayout<Cached>;
  using Latent = typename Layout::Latent;

  uint8_t* begin;

  // `cache` is (slots, Layout::kBytes).
  __device__ __forceinline__ CachedRow(uint8_t* cache, int64_t slot)
      : begin(cache + slot * Layout::kBytes) {}

  __device__ __forceinline__ Latent* latents() const { return reinterpret_cast<Latent*>(begin); }
  // Of a PackedRow only.
  __device__ __forceinline__ float* scales() const {
    return reinterpret_cast<float*>(begin + PackedRow::kScalesAt);
  }
  __device__ __forceinline__ uint8_t* rope() const { return begin + Layout::kRopeAt; }
};

// The smallest power of two that is at least amax / 448 and at least kMinScale.
__device__ __forceinline__ float scale_of(float amax) {
  const float min_scale = fmaxf(__fdiv_rn(amax, kE4m3Max), kMinScale);
  return __uint_as_float((__float_as_uint(min_scale) + 0x7fffff) & 0x7f800000);
}

// 1 / power, where `power` is a power of two.
__device__ __forceinline__ float inverse_power_of_two(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The maximum over groups of kLanes neighbouring lanes, in all of them.
template <int kLanes>
__device__ __forceinline__ float max_of_lanes(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

// The elements of k_pe that are rotated as pair `pair`: this one, and the one kPairDistance later.
template <RopeStyle kStyle>
__device__ __forceinline__ int first_of_pair(int pair) {
  return kStyle == RopeStyle::kInterleaved ? 2 * pair : pair;
}
template <RopeStyle kStyle>
constexpr int kPairDistance = kStyle == RopeStyle::kInterleaved ? 1 : kRope / 2;

// Products are rounded before they are added, as reference/kv_write.py specifies.
__device__ __forceinline__ float2 rotated(float2 pair, float cosine, float sine) {
  return {__fsub_rn(__fmul_rn(pair.x, cosine), __fmul_rn(pair.y, sine)),
          __fadd_rn(__fmul_rn(pair.y, cosine), __fmul_rn(pair.x, sine))};
}

}  // namespace kernelcat
