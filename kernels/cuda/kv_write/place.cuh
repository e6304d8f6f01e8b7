// Where a new token goes, and what its keys and values are multiplied by on the way.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

enum class Style { kNeox, kInterleaved };
enum class Scales { kNone, kHead, kPage };

// Rounds to nearest even; float8_e4m3fn saturates.
template <>
__device__ __forceinline__ float8_e4m3fn from_float<float8_e4m3fn>(float value) {
  return float8_e4m3fn(value);
}

// The sequence that `token` belongs to: the last that begins no later. The warp, all lanes with the
// same token, looks at 32 beginnings at once.
__device__ __forceinline__ int sequence_of(int token, const int* cu_q, int batch) {
  int first = 0, count = batch;
  while (count > 1) {
    const int step = ceil_div(count, kWarpThreads), offset = lane_index() * step;
    const bool begun = offset < count && __ldg(cu_q + first + offset) <= token;
    const int last = 31 - __clz(__ballot_sync(0xffffffff, begun));
    first += last * step;
    count = min(step, count - last * step);
  }
  return first;
}

// Where tokens are in their sequences, and where those are in the cache.
struct Places {
  const int* block_table;  // (batch, table_width)
  const int* kv_lens;      // (batch)
  const int* cu_q;         // (batch + 1)
  int batch, table_width, page_bits;

  __device__ __forceinline__ int position(int token, int s) const {
    return __ldg(kv_lens + s) - __ldg(cu_q + s + 1) + token;
  }
  __device__ __forceinline__ int page(int s, int position) const {
    return __ldg(block_table + static_cast<int64_t>(s) * table_width + (position >> page_bits));
  }
  // Among the slots of all pages.
  __device__ __forceinline__ int64_t slot(int page, int position) const {
    return (static_cast<int64_t>(page) << page_bits) + (position & ((1 << page_bits) - 1));
  }
};

template <Scales kScales>
__device__ __forceinline__ float inverse_of(const float* scale, int page, int head, int kv_heads) {
  if constexpr (kScales == Scales::kNone) return 1.0f;
  const int64_t row = kScales == Scales::kPage ? page : 0;
  return 1.0f / __ldg(scale + row * kv_heads + head);
}

}  // namespace kernelcat
