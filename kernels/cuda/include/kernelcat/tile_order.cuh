// The order in which output tiles are computed, whole or in pieces of their k range.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

struct Tile {
  int m, n;
};

// Tile `index` when tiles run down columns of `group_m` tile rows: tiles computed at the same time
// then form a rectangle that shares operands in L2. Unsigned, because that divides faster.
__device__ __forceinline__ Tile grouped_tile(uint32_t index, uint32_t num_m, uint32_t num_n,
                                             uint32_t group_m) {
  const uint32_t group_size = group_m * num_n, group = index / group_size;
  const uint32_t first_m = group * group_m, rows = min(num_m - first_m, group_m);
  const uint32_t in_group = index - group * group_size, n = in_group / rows;
  return {static_cast<int>(first_m + in_group - n * rows), static_cast<int>(n)};
}

// Blocks [k_begin, k_end) of a tile's k range. `part` counts the tiles that are split; -1: whole.
struct Work {
  Tile tile;
  int k_begin, k_end, part, split;
};

// Every unit of work in its order: `num_whole` tiles, then the others in `num_splits` pieces each.
// The pieces of a tile are neighbours, so that they run together. With no whole tiles this is
// split-k; with a tail of split tiles, the last wave of Stream-K (Osama et al. 2023).
struct WorkList {
  int num_m, num_n, num_k, num_whole, num_splits, group_m;

  __device__ __forceinline__ uint32_t size() const {
    return num_whole + (num_m * num_n - num_whole) * num_splits;
  }

  // Unit `index`; without kSplit all tiles are whole.
  template <bool kSplit>
  __device__ __forceinline__ Work at(uint32_t index) const {
    if (!kSplit || index < static_cast<uint32_t>(num_whole)) {
      return {grouped_tile(index, num_m, num_n, group_m), 0, num_k, -1, 0};
    }
    const uint32_t splits = num_splits, part = (index - num_whole) / splits;
    const uint32_t split = index - num_whole - part * splits;
    const auto k_at = [&](uint32_t s) { return static_cast<int>(num_k * s / splits); };
    return {grouped_tile(num_whole + part, num_m, num_n, group_m), k_at(split), k_at(split + 1),
            static_cast<int>(part), static_cast<int>(split)};
  }
};

}  // namespace kernelcat
