// The order in which tiles of a product are computed, whole or in splits of their k range.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// A row and a column of tiles.
struct Tile {
  int m, n;
};

// Tile `index` of num_m x num_n tiles, in groups of `group_m` rows of tiles, and inside a group
// column after column: tiles that are computed at the same time then form a rectangle, which shares
// operands in L2. Unsigned, because unsigned division is faster.
__device__ __forceinline__ Tile grouped_tile(uint32_t index, uint32_t num_m, uint32_t num_n,
                                             uint32_t group_m) {
  const uint32_t group_size = group_m * num_n, group = index / group_size;
  const uint32_t first_m = group * group_m, rows = min(num_m - first_m, group_m);
  const uint32_t in_group = index - group * group_size, n = in_group / rows;
  return {static_cast<int>(first_m + in_group - n * rows), static_cast<int>(n)};
}

// What a cluster computes at a time: k-blocks [k_begin, k_end) of a tile. `split_tile` numbers the
// tiles that are split and is -1 for a whole tile; `split` numbers the splits of a tile.
struct WorkItem {
  Tile tile;
  int k_begin, k_end, split_tile, split;
};

// All work items in their order: `num_whole_tiles` tiles, then `num_splits` splits of each other
// tile. The splits of a tile follow each other, so that they run at the same time. Without whole
// tiles this is split-K; with whole tiles, the last wave of Stream-K (Osama et al. 2023).
struct WorkList {
  int num_m, num_n, num_k, num_whole_tiles, num_splits, group_m;

  __device__ __forceinline__ uint32_t size() const {
    return num_whole_tiles + (num_m * num_n - num_whole_tiles) * num_splits;
  }

  // Work item `index`; without kSplit all tiles are whole.
  template <bool kSplit>
  __device__ __forceinline__ WorkItem at(uint32_t index) const {
    if (!kSplit || index < static_cast<uint32_t>(num_whole_tiles)) {
      return {.tile = grouped_tile(index, num_m, num_n, group_m),
              .k_begin = 0,
              .k_end = num_k,
              .split_tile = -1,
              .split = 0};
    }
    const uint32_t splits = num_splits, split_tile = (index - num_whole_tiles) / splits;
    const uint32_t split = index - num_whole_tiles - split_tile * splits;
    const auto k_at = [&](uint32_t s) { return static_cast<int>(num_k * s / splits); };
    return {.tile = grouped_tile(num_whole_tiles + split_tile, num_m, num_n, group_m),
            .k_begin = k_at(split),
            .k_end = k_at(split + 1),
            .split_tile = static_cast<int>(split_tile),
            .split = static_cast<int>(split)};
  }
};

}  // namespace kernelcat
