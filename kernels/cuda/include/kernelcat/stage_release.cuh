// How a consumer warp releases a stage of a ring: by an arrival at the stage's empty barrier.
#pragma once

#include <kernelcat/cluster.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// After wgmmas have read the stage. Every thread block of the cluster loads a part of the stage for
// all of them, so the warp arrives at the empty barrier of each.
template <int kClusterSize>
__device__ __forceinline__ void release_stage(Barrier& empty) {
  const int lane = lane_index();
  if constexpr (kClusterSize == 1) {
    if (lane == 0) empty.arrive();
  } else {
    if (lane < kClusterSize) arrive_remote(empty, lane);
  }
}

// The same where the thread blocks form rows and columns, and load only for those of their own row
// and column: the warp arrives at the empty barriers of these. `rank` is that of the warp's own
// thread block.
template <int kClusterM, int kClusterN>
__device__ __forceinline__ void release_stage(Barrier& empty, int rank) {
  if constexpr (kClusterM == 1 || kClusterN == 1) {
    release_stage<kClusterM * kClusterN>(empty);
  } else {
    const int row = rank / kClusterN, col = rank % kClusterN, lane = lane_index();
    const int other_row = lane - kClusterN + (lane - kClusterN >= row);
    const int cta = lane < kClusterN ? row * kClusterN + lane : other_row * kClusterN + col;
    if (lane < kClusterM + kClusterN - 1) arrive_remote(empty, cta);
  }
}

// After ordinary loads have read the stage, which only this thread block's producer fills. Without
// the fence the arrival could overtake loads in flight, and TMA overwrite what they read.
__device__ __forceinline__ void release_stage_after_loads(Barrier& empty) {
  fence_async_shared();
  __syncwarp();
  if (lane_index() == 0) empty.arrive();
}

}  // namespace kernelcat
