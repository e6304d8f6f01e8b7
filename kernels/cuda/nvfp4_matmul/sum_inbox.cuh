// Adds up a tile's partial sums where the thread blocks of a cluster split the tile's k range.
// Every thread block finishes some of the columns, and the others send it their sums of these
// columns.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/remote_store.cuh>

#include "output.cuh"

namespace kernelcat {

// The columns of a tile in groups of kBlocks blocks of eight columns. Thread block `group` %
// kSplitK of the cluster finishes a group.
template <typename Config>
struct SumGroups {
  static constexpr int kBlocks = Config::Output::kStoredBlocks;  // of eight columns
  static constexpr int kGroups = Config::BLOCK_N / 8 / kBlocks;
  static constexpr int kMaxOwned = ceil_div(kGroups, Config::kSplitK);  // by a thread block

  static __device__ __forceinline__ bool is_owned(int group, int rank) {
    return Config::kSplitK == 1 || group % Config::kSplitK == rank;
  }
};

// What a consumer warpgroup receives from the same warpgroup of the cluster's other thread blocks,
// in the order of their accumulators.
template <typename Config, int kSplitK = Config::kSplitK>
struct SumInbox {
  using Groups = SumGroups<Config>;
  float4 sums[kSplitK - 1][Groups::kMaxOwned][Groups::kBlocks][kWarpgroupThreads];
  Barrier arrived;

  // Adds the other thread blocks' sums to `accumulator` in the groups that thread block `rank`
  // owns. All threads of the warpgroup call this, once: the inbox is not used again. Groups from
  // `num_groups` on lie outside of D.
  __device__ __forceinline__ void add_up(typename Config::Sums& accumulator, int rank,
                                         int num_groups) {
    const int thread = threadIdx.x % kWarpgroupThreads;
    const int num_owned = ceil_div(max(num_groups - rank, 0), kSplitK);
    if (thread == 0) arrived.arrive_expect(sizeof(sums[0][0]) * (kSplitK - 1) * num_owned);
#pragma unroll
    for (int g = 0; g < Groups::kGroups; ++g) {
      const int owner = g % kSplitK;
      if (owner == rank || g >= num_groups) continue;
      const int sender = rank - (rank > owner);  // this thread block, without the owner
#pragma unroll
      for (int b = 0; b < Groups::kBlocks; ++b) {
        const float* z = &accumulator[4 * (g * Groups::kBlocks + b)];
        const float4 four = {z[0], z[1], z[2], z[3]};
        store_remote(&sums[sender][g / kSplitK][b][thread], four, arrived, owner);
      }
    }
    arrived.wait(0);
#pragma unroll
    for (int g = 0; g < Groups::kGroups; ++g) {
      if (!Groups::is_owned(g, rank) || g >= num_groups) continue;
#pragma unroll
      for (int b = 0; b < Groups::kBlocks; ++b) {
        float* z = &accumulator[4 * (g * Groups::kBlocks + b)];
#pragma unroll
        for (int sender = 0; sender < kSplitK - 1; ++sender) {
          const float4 four = sums[sender][g / kSplitK][b][thread];
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
