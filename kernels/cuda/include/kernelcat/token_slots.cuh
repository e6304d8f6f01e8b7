// Where new tokens go in a paged cache, and what the kernels that write them there have in common.
#pragma once

#include <kernelcat/cache_scales.cuh>
#include <kernelcat/fp8.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// Which elements RoPE rotates as a pair: i and i + rotary_dim / 2, or 2 * i and 2 * i + 1.
enum class RopeStyle { kNeox, kInterleaved };

// Rounds to nearest even; float8_e4m3fn saturates.
template <>
__device__ __forceinline__ float8_e4m3fn from_float<float8_e4m3fn>(float value) {
  return float8_e4m3fn(value);
}

constexpr int kVector = 8;  // 16-bit elements in 16 bytes

// values[0 .. 3] * factor in float8_e4m3fn, rounded as from_float rounds.
__device__ __forceinline__ uint32_t pack_four_e4m3(const float* values, float factor = 1.0f) {
  const uint32_t low = pack_e4m3(values[0] * factor, values[1] * factor);
  const uint32_t high = pack_e4m3(values[2] * factor, values[3] * factor);
  return low | high << 16;
}

// The sequence that `token` belongs to: the last one with cu_q[s] <= token; `cu_q` is (batch + 1,).
// All lanes of the warp have the same token, and compare 32 entries of cu_q at once.
__device__ __forceinline__ int warp_sequence_of(int token, const int* cu_q, int batch) {
  int first = 0, count = batch;
  while (count > 1) {
    const int step = ceil_div(count, kWarpThreads), offset = lane_index() * step;
    const bool has_begun = offset < count && __ldg(cu_q + first + offset) <= token;
    const int last = 31 - __clz(__ballot_sync(0xffffffff, has_begun));
    first += last * step;
    count = min(step, count - last * step);
  }
  return first;
}

// Finds the position of a token in its sequence, and the slot of that position in the cache.
struct TokenSlots {
  const int* block_table;  // (batch, table_width)
  const int* kv_lens;      // (batch,)
  const int* cu_q;         // (batch + 1,)
  int batch, table_width;
  int page_bits;  // log2 of the page size

  __device__ __forceinline__ int sequence(int token) const {
    return warp_sequence_of(token, cu_q, batch);
  }
  __device__ __forceinline__ int position(int token, int sequence) const {
    return __ldg(kv_lens + sequence) - __ldg(cu_q + sequence + 1) + token;
  }
  __device__ __forceinline__ int page(int sequence, int position) const {
    return __ldg(block_table + static_cast<int64_t>(sequence) * table_width +
                 (position >> page_bits));
  }
  // Index among the slots of all pages.
  __device__ __forceinline__ int64_t slot(int page, int position) const {
    return (static_cast<int64_t>(page) << page_bits) + (position & ((1 << page_bits) - 1));
  }
};

}  // namespace kernelcat
