// Sums of integers over the threads of a thread block.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// The sums of two integers: over the threads before this one, and over all.
struct PairSum {
  int2 before, total;
};

// All threads call this together. `scratch` is shared memory, (kThreads / 32,).
template <int kThreads>
__device__ __forceinline__ PairSum block_pair_sum(int2 value, int2* scratch) {
  int2 end = value;
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const int x = __shfl_up_sync(0xffffffff, end.x, distance);
    const int y = __shfl_up_sync(0xffffffff, end.y, distance);
    if (lane_index() >= distance) end = {end.x + x, end.y + y};
  }
  const int warp = threadIdx.x / kWarpThreads;
  if (lane_index() == kWarpThreads - 1) scratch[warp] = end;
  __syncthreads();
  PairSum sum = {{end.x - value.x, end.y - value.y}, {0, 0}};
#pragma unroll
  for (int i = 0; i < kThreads / kWarpThreads; ++i) {
    const int2 of_warp = scratch[i];
    if (i < warp) sum.before = {sum.before.x + of_warp.x, sum.before.y + of_warp.y};
    sum.total = {sum.total.x + of_warp.x, sum.total.y + of_warp.y};
  }
  __syncthreads();
  return sum;
}

}  // namespace kernelcat
