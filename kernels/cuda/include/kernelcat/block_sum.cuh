// Sums of integers over the threads of a thread block.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

struct BlockSum {
  int before;  // of the threads before this one
  int total;
};

// All threads call this together. `scratch` is shared memory, (kThreads / 32,).
template <int kThreads>
__device__ __forceinline__ BlockSum block_sum(int value, int* scratch) {
  constexpr int kWarps = kThreads / kWarpThreads;
  int end = value;
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffff, end, distance);
    if (lane_index() >= distance) end += before;
  }
  const int warp = threadIdx.x / kWarpThreads;
  if (lane_index() == kWarpThreads - 1) scratch[warp] = end;
  __syncthreads();
  BlockSum sum = {end - value, 0};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int of_warp = scratch[i];
    if (i < warp) sum.before += of_warp;
    sum.total += of_warp;
  }
  __syncthreads();
  return sum;
}

}  // namespace kernelcat
