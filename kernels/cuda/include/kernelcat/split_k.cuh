// The reduction of split-K: partial sums are added up in the same order on every run.
#pragma once

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
  const auto partial = [&](int s, int tile, int i) {
    return reinterpret_cast<float4*>(partials +
                                     ((s * kNumTiles + tile) * kCount + i) * kWarpgroupThreads) +
           thread;
  };
#pragma unroll
  for (int tile = 0; tile < kNumTiles; ++tile) {
    if (tile >= num_tiles_inside) continue;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      if (i >= num_sums_inside) break;
      const float4 four = {sums[tile][i], sums[tile][i + 1], sums[tile][i + 2], sums[tile][i + 3]};
      __stcg(partial(split, tile, i), four);
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
    if (tile >= num_tiles_inside) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[tile][i] = 0.0f;
    for (int s = 0; s < num_splits; ++s) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        if (i >= num_sums_inside) break;
        const float4 four = __ldcg(partial(s, tile, i));
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
