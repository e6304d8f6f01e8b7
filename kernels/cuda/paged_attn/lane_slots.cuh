// The slots of a KV tile's tokens, spread over the lanes of a warp: lane l has those of tokens l,
// l + 32 ..
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kInvisible = -1;  // the slot of a token that no query sees

// The slot of token `first` + `offset` of the tile, which lane `offset` + `first` % 32 has. `first`
// is the same in all lanes, and best known at compile time.
template <int kCount>
__device__ __forceinline__ int slot_of(const int (&slots)[kCount], int first, int offset) {
  int lane_slot = slots[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    if (first / kWarpThreads == i) lane_slot = slots[i];
  }
  return __shfl_sync(0xffffffff, lane_slot, first % kWarpThreads + offset);
}

}  // namespace kernelcat
