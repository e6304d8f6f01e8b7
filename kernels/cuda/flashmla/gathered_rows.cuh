// Rows of the cache that lie anywhere (pages of one token), loaded by cp.async. They lie in shared
// memory as TMA would leave boxes of 128-byte rows in the 128-byte swizzle.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/sync.cuh>

#include "segments.cuh"

namespace kernelcat {

constexpr int kGatherThreads = kWarpgroupThreads;
constexpr int kGatherLanes = 8;                             // per row
constexpr int kGatherRows = kGatherThreads / kGatherLanes;  // at a time
constexpr int kNoSlot = -1;

// The row among kGatherRows, and the 16-byte unit of every 128 bytes of it, that this thread loads.
__device__ __forceinline__ int gather_row() {
  return threadIdx.x % kGatherThreads / kGatherLanes;
}
__device__ __forceinline__ int gather_unit() {
  return threadIdx.x % kGatherLanes;
}

// The slot of a token of the segment's sequence, with pages of one token; kNoSlot beyond its end.
// `block_table` is (batch, table_width).
__device__ __forceinline__ int gather_slot(const int* block_table, int table_width,
                                           const Segment& segment, int token) {
  if (token >= segment.sequence.num_tokens) return kNoSlot;
  return __ldg(block_table + static_cast<int64_t>(segment.sequence_idx) * table_width + token);
}

// Copies the thread's 16 of the 128 bytes at `source` to row `row` of a chunk, which is aligned to
// 1024 bytes; writes zeros, and reads nothing, if there is no slot.
__device__ __forceinline__ void gather_span(uint8_t* chunk, int row, const uint8_t* source,
                                            bool has_slot) {
  const uint32_t offset = swizzled<128>(row * 128 + gather_unit() * 16);
  async_copy_16(shared_address(chunk) + offset, source + gather_unit() * 16, has_slot);
}

// Arrives at `barrier`, as one of kGatherThreads, once the copies that this thread has started have
// landed.
__device__ __forceinline__ void arrive_when_gathered(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

}  // namespace kernelcat
