// kernels/cuda/include/kernelcat/sync.cuh on the host.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

inline int lane_index() {
  return threadIdx.x % kWarpThreads;
}
inline int warp_index() {
  return __shfl_sync(0xffffffff, threadIdx.x / kWarpThreads, 0);
}
inline bool elect_one() {
  __syncwarp();
  return lane_index() == 0;
}
inline void named_barrier_sync(int barrier, int num_threads) {
  host::block->named_barriers[barrier].meet(num_threads);
}
template <int kRegisters>
void increase_registers() {}
template <int kRegisters>
void decrease_registers() {}
inline void fence_async_shared() {}

}  // namespace kernelcat
