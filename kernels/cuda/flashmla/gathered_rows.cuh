// Rows of the cache that lie anywhere, by cp.async: what they leave in shared memory is what a
// tensor map's boxes of 128-byte rows would, swizzled.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/sync.cuh>

#include "segments.cuh"

namespace kernelcat {

constexpr int kGatherThreads = kWarpgroupThreads;  // a warpgroup: eight lanes have a row
constexpr int kGatherLanes = 8;
constexpr int kGatherRows = kGatherThreads / kGatherLanes;  // at a time
constexpr int kNoSlot = -1;

// Which of the kGatherRows rows the lane has a part of, and which part of every 128 bytes.
__device__ __forceinline__ int gather_row() {
  return threadIdx.x % kGatherThreads / kGatherLanes;
}
__device__ __forceinline__ int gather_unit() {
  return threadIdx.x % kGatherLanes;
}

// The slot of a sequence's token, in pages of one; none beyond its end.
__device__ __forceinline__ int gather_slot(const int* block_table, int table_width,
                                           const Segment& segment, int token) {
  if (token >= segment.sequence.num_tokens) return kNoSlot;
  return __ldg(block_table + static_cast<int64_t>(segment.index) * table_width + token);
}

// The lane's 16 of 128 bytes of row `row` of a chunk, which is aligned to 1024: from `source`, the
// first of the 128; zeros, and nothing is read, where there is no slot.
__device__ __forceinline__ void gather_span(uint8_t* chunk, int row, const uint8_t* source,
                                            bool has_slot) {
  const uint32_t place = swizzled<128>(row * 128 + gather_unit() * 16);
  async_copy_16(shared_address(chunk) + place, source + gather_unit() * 16, has_slot);
}

// One arrival, of the kGatherThreads that a barrier waits for, made when this thread's copies so
// far have landed.
__device__ __forceinline__ void arrive_when_gathered(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

}  // namespace kernelcat
