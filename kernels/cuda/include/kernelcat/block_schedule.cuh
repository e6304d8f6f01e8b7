// Which tiles a thread block of a persistent kernel computes, and in which order.
#pragma once

#include <kernelcat/cluster.cuh>
#include <kernelcat/tile_order.cuh>

namespace kernelcat {

// The work of a thread block: its tile of every cluster tile that its cluster computes. The tiles
// of a cluster's thread blocks lie in kClusterM rows of kClusterN tiles, numbered row after row.
// With kSwap what is tiled is the transpose of an m x n product.
template <typename Config>
struct BlockSchedule {
  WorkList list;  // of cluster tiles
  int rank;       // of the thread block in its cluster

  static __device__ __forceinline__ BlockSchedule of(int m, int n, int k, int num_whole_tiles,
                                                     int num_splits, int group_m) {
    const WorkList list{
        .num_m = ceil_div(Config::kSwap ? n : m, Config::BLOCK_M * Config::kClusterM),
        .num_n = ceil_div(Config::kSwap ? m : n, Config::BLOCK_N * Config::kClusterN),
        .num_k = ceil_div(k, Config::BLOCK_K),
        .num_whole_tiles = num_whole_tiles,
        .num_splits = num_splits,
        .group_m = group_m};
    return {list, Config::kClusterSize > 1 ? static_cast<int>(cluster_rank()) : 0};
  }

  // The cluster takes work items `first()`, `first() + step()` ...
  static __device__ __forceinline__ uint32_t first() { return blockIdx.x / Config::kClusterSize; }
  static __device__ __forceinline__ uint32_t step() { return gridDim.x / Config::kClusterSize; }
  __device__ __forceinline__ uint32_t size() const { return list.size(); }
  __device__ __forceinline__ WorkItem operator[](uint32_t index) const {
    return list.at<Config::kSplit>(index);
  }

  // The row and the column of the thread block's tile among the cluster's tiles.
  __device__ __forceinline__ int cluster_row() const {
    return Config::kClusterM > 1 ? rank / Config::kClusterN : 0;
  }
  __device__ __forceinline__ int cluster_col() const {
    if (Config::kClusterN == 1) return 0;
    return Config::kClusterM > 1 ? rank % Config::kClusterN : rank;
  }

  // The first row and column of the thread block's tile in a cluster tile.
  __device__ __forceinline__ int row_of(Tile tile) const {
    return (tile.m * Config::kClusterM + cluster_row()) * Config::BLOCK_M;
  }
  __device__ __forceinline__ int col_of(Tile tile) const {
    return (tile.n * Config::kClusterN + cluster_col()) * Config::BLOCK_N;
  }

  // Calls `function(work, row, col)` for each work item, with the first row and column of the
  // thread block's tile.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const uint32_t num_clusters = step();
    for (uint32_t i = first(); i < size(); i += num_clusters) {
      const WorkItem work = (*this)[i];
      function(work, row_of(work.tile), col_of(work.tile));
    }
  }
};

// A schedule whose first work item is worked out before it is needed, while barriers are
// initialised: the divisions that an item takes are then over when loading may begin.
template <typename Config>
struct StartedSchedule : BlockSchedule<Config> {
  WorkItem begin;

  StartedSchedule() = default;

  __device__ __forceinline__ explicit StartedSchedule(const BlockSchedule<Config>& schedule)
      : BlockSchedule<Config>(schedule), begin(schedule[schedule.first()]) {
    // Keeps the compiler from doing it later.
    asm volatile("" : "+r"(begin.tile.m), "+r"(begin.tile.n));
    asm volatile("" : "+r"(begin.k_begin), "+r"(begin.k_end));
  }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    WorkItem work = begin;
    for (uint32_t i = this->first(); i < this->size();) {
      function(work, this->row_of(work.tile), this->col_of(work.tile));
      i += this->step();
      if (i < this->size()) work = (*this)[i];
    }
  }
};

}  // namespace kernelcat
