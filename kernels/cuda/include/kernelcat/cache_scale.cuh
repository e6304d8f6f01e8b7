// What keys and values are multiplied by on their way into the cache.
#pragma once

#include <kernelcat/token_slots.cuh>

namespace kernelcat {

// What the cached keys or values of a head are multiplied by to be read; `scale` is (1 or pages,
// kv_heads).
template <Scales kScales>
__device__ __forceinline__ float cache_scale(const float* scale, int page, int head, int kv_heads) {
  if constexpr (kScales == Scales::kNone) return 1.0f;
  const int64_t row = kScales == Scales::kPage ? page : 0;
  return __ldg(scale + row * kv_heads + head);
}

template <Scales kScales>
__device__ __forceinline__ float inverse_scale(const float* scale, int page, int head,
                                               int kv_heads) {
  if constexpr (kScales == Scales::kNone) return 1.0f;
  return 1.0f / cache_scale<kScales>(scale, page, head, kv_heads);
}

}  // namespace kernelcat
