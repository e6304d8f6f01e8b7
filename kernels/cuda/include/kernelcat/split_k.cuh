// Adding up the partial products of a split k range, in the same order on every run.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Every split leaves its sums in `partials` and counts itself; the warpgroup that finds the others
// done adds all of them in order of split, holds the result in `sums`, and returns true. All 128
// threads of a warpgroup call this together; `is_last` (shared) and `barrier` are its own.
//
// `partials` has num_splits slots of kNumTiles * kCount * 128 floats; `*counter` is zero before and
// after. Of the kNumTiles tiles only the first `num_live` matter (this warp's rows of the others
// lie outside the result), and of their kCount sums only the first `num_live_sums` (so do the
// columns of the others), a multiple of 4; only those are moved.
template <int kNumTiles, int kCount>
__device__ __forceinline__ bool reduce_splits(float (&sums)[kNumTiles][kCount], float* partials,
                                              uint32_t* counter, int split, int num_splits,
                                              int num_live, uint32_t* is_last, int barrier,
                                              int num_live_sums = kCount) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const auto place = [&](int s, int tile, int i) {
    return reinterpret_cast<float4*>(partials +
                                     ((s * kNumTiles + tile) * kCount + i) * kWarpgroupThreads) +
           thread;
  };
#pragma unroll
  for (int tile = 0; tile < kNumTiles; ++tile) {
    if (tile >= num_live) continue;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      if (i >= num_live_sums) break;
      const float4 four = {sums[tile][i], sums[tile][i + 1], sums[tile][i + 2], sums[tile][i + 3]};
      __stcg(place(split, tile, i), four);
    }
  }
  __threadfence();
  named_barrier_sync(barrier, kWarpgroupThreads);
  if (thread == 0) {
    *is_last = atomicAdd(counter, 1) + 1 == num_splits;
    if (*is_last) *counter = 0;
    __threadfence();
  }
  named_barrier_sync(barrier, kWarpgroupThreads);
  if (!*is_last) return false;

#pragma unroll
  for (int tile = 0; tile < kNumTiles; ++tile) {
    if (tile >= num_live) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[tile][i] = 0.0f;
    for (int s = 0; s < num_splits; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        if (i >= num_live_sums) break;
        const float4 four = __ldcg(place(s, tile, i));
        sums[tile][i] += four.x;
        sums[tile][i + 1] += four.y;
        sums[tile][i + 2] += four.z;
        sums[tile][i + 3] += four.w;
      }
    }
  }
  return true;
}

}  // namespace kernelcat
