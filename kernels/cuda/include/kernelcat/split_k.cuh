// The reduction of split-K: partial sums are added up in the same order on every run.
#pragma once

#include <kernelcat/partial_tiles.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// Every split stores its sums in `partials` and increments `*counter`. The warpgroup that arrives
// last adds up the partial sums of all splits in the order of the splits, holds the result in
// `sums`, and returns true; the other warpgroups return false. All 128 threads of a warpgroup call
// this together; it needs a flag `is_last` in shared memory and a named barrier to itself.
//
// `partials` has num_splits slots of kNumTiles * kCount * 128 floats; `*counter` is zero before and
// after. Only sums inside the result are moved: those of the first `num_tiles_inside` of the
// kNumTiles tiles of 64 rows (the warp's rows of further tiles lie outside), and of their kCount
// sums the first `num_sums_inside`, a multiple of 4 (the columns of further sums lie outside).
template <int kNumTiles, int kCount>
__device__ __forceinline__ bool reduce_splits(float (&sums)[kNumTiles][kCount], float* partials,
                                              uint32_t* counter, int split, int num_splits,
                                              int num_tiles_inside, uint32_t* is_last, int barrier,
                                              int num_sums_inside = kCount) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const PartialTiles<kNumTiles, kCount> inside = {num_tiles_inside, num_sums_inside};
  const auto partial = [&](int s, int tile) {
    const int first = (s * kNumTiles + tile) * kCount * kWarpgroupThreads;
    return reinterpret_cast<float4*>(partials + first) + thread;
  };
  inside.store(sums, partial, split);
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
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[tile][i] = 0.0f;
  }
  inside.add(sums, partial, 0, num_splits);
  return true;
}

}  // namespace kernelcat
