// Adding up a tile's sums where the blocks of a cluster split its k range: every block finishes
// some of the columns, for which the others send it theirs.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/remote_store.cuh>

#include "output.cuh"

namespace kernelcat {

// Columns of a tile are finished in groups of eight-column blocks; of a group, one block of the
// cluster. What a warpgroup gets from its kin in other blocks lies as their registers do.
template <typename Config>
struct SumGroups {
  static constexpr int kBlocks = Config::Output::kStoredBlocks;  // of eight columns
  static constexpr int kGroups = Config::BLOCK_N / 8 / kBlocks;
  static constexpr int kOwn = ceil_div(kGroups, Config::kSplitK);  // at most

  static __device__ __forceinline__ bool is_own(int group, int rank) {
    return Config::kSplitK == 1 || group % Config::kSplitK == rank;
  }
};

template <typename Config, int kSplitK = Config::kSplitK>
struct SumInbox {
  using Groups = SumGroups<Config>;
  float4 sums[kSplitK - 1][Groups::kOwn][Groups::kBlocks][kWarpgroupThreads];
  Barrier arrived;

  // Of a warpgroup, once: afterwards `all` are those of the tile in the block's own groups.
  // Groups from `num_live` on are not there.
  __device__ __forceinline__ void add_up(typename Config::Sums& all, int rank, int num_live) {
    const int thread = threadIdx.x % kWarpgroupThreads;
    const int own = ceil_div(max(num_live - rank, 0), kSplitK);
    if (thread == 0) arrived.arrive_expect(sizeof(sums[0][0]) * (kSplitK - 1) * own);
#pragma unroll
    for (int g = 0; g < Groups::kGroups; ++g) {
      const int owner = g % kSplitK;
      if (owner == rank || g >= num_live) continue;
      const int from = rank - (rank > owner);
#pragma unroll
      for (int b = 0; b < Groups::kBlocks; ++b) {
        const float* z = &all[4 * (g * Groups::kBlocks + b)];
        const float4 four = {z[0], z[1], z[2], z[3]};
        store_remote(&sums[from][g / kSplitK][b][thread], four, arrived, owner);
      }
    }
    arrived.wait(0);
#pragma unroll
    for (int g = 0; g < Groups::kGroups; ++g) {
      if (!Groups::is_own(g, rank) || g >= num_live) continue;
#pragma unroll
      for (int b = 0; b < Groups::kBlocks; ++b) {
        float* z = &all[4 * (g * Groups::kBlocks + b)];
#pragma unroll
        for (int from = 0; from < kSplitK - 1; ++from) {
          const float4 four = sums[from][g / kSplitK][b][thread];
          z[0] += four.x;
          z[1] += four.y;
          z[2] += four.z;
          z[3] += four.w;
        }
      }
    }
  }
};

template <typename Config>
struct SumInbox<Config, 1> {};

}  // namespace kernelcat
