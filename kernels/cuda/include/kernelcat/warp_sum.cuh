// Sums over the lanes of a warp.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// The sum of `value` over all lanes, in all lanes.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, mask);
  }
  return value;
}

}  // namespace kernelcat
