// What a block of a persistent kernel does: its tile of each of its cluster's units of work.
#pragma once

#include <kernelcat/cluster.cuh>
#include <kernelcat/tile_order.cuh>

namespace kernelcat {

// The blocks of a cluster lie below (kClusterM) or beside (kClusterN) each other. With kSwap what
// is tiled is the transpose of an m x n product.
template <typename Config>
struct BlockSchedule {
  WorkList list;  // in tiles of a whole cluster
  int rank;       // of the block in its cluster

  static __device__ __forceinline__ BlockSchedule of(int m, int n, int k, int num_whole,
                                                     int num_splits, int group_m) {
    const WorkList list{ceil_div(Config::kSwap ? n : m, Config::BLOCK_M * Config::kClusterM),
                        ceil_div(Config::kSwap ? m : n, Config::BLOCK_N * Config::kClusterN),
                        ceil_div(k, Config::BLOCK_K),
                        num_whole,
                        num_splits,
                        group_m};
    return {list, Config::kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0};
  }

  // The cluster works on units `first()`, `first() + step()` ...
  static __device__ __forceinline__ uint32_t first() { return blockIdx.x / Config::kClusterSize; }
  static __device__ __forceinline__ uint32_t step() { return gridDim.x / Config::kClusterSize; }
  __device__ __forceinline__ uint32_t size() const { return list.size(); }
  __device__ __forceinline__ Work operator[](uint32_t index) const {
    return list.at<Config::kSplit>(index);
  }

  // The first row and column of the block's tile, of those of a cluster.
  __device__ __forceinline__ int row_of(Tile tile) const {
    return (tile.m * Config::kClusterM + (Config::kClusterM > 1 ? rank : 0)) * Config::BLOCK_M;
  }
  __device__ __forceinline__ int col_of(Tile tile) const {
    return (tile.n * Config::kClusterN + (Config::kClusterN > 1 ? rank : 0)) * Config::BLOCK_N;
  }

  // Calls `function(work, row, col)` for each unit, with its tile's first row and column.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const uint32_t num_clusters = step();
    for (uint32_t i = first(); i < size(); i += num_clusters) {
      const Work work = (*this)[i];
      function(work, row_of(work.tile), col_of(work.tile));
    }
  }
};

}  // namespace kernelcat
