// Indices of lanes and warps on the host. As on a GPU, all lanes must call warp_index() together.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

inline int lane_index() {
  return host::lane();
}
inline int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / kWarpThreads), 0);
}
inline void fence_async_shared() {}

}  // namespace kernelcat
