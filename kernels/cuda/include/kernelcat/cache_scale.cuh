// What keys and values are multiplied by on their way into the cache.
#pragma once

#include <kernelcat/token_slots.cuh>

namespace kernelcat {

// 1 / scale; `scale` is (1 or pages, kv_heads).
template <Scales kScales>
__device__ __forceinline__ float inverse_scale(const float* scale, int page, int head,
                                               int kv_heads) {
  if constexpr (kScales == Scales::kNone) return 1.0f;
  const int64_t row = kScales == Scales::kPage ? page : 0;
  return 1.0f / __ldg(scale + row * kv_heads + head);
}

}  // namespace kernelcat
