// Pairs of tiles of a product, each for a cluster of two thread blocks: tiles 2i and 2i + 1.
#pragma once

#include <kernelcat/tile_order.cuh>

namespace kernelcat {

// The number of num_m x num_n tiles in pairs. If both are odd, the last pair has a tile too many.
__device__ __forceinline__ int num_paired_tiles(int num_m, int num_n) {
  return num_m * num_n + (num_m & num_n & 1);
}

// A tile of a pair. The tiles of a pair lie below each other and need the same weights, or in the
// last of an odd number of rows of tiles beside each other.
struct PairedTile : Tile {
  bool shares_weights;
};

// Tile `index` of num_m x num_n tiles in pairs, in groups of `group_m` rows of tiles (an even
// number). Inside a group two columns are followed by the next two: the pairs of the first column,
// those of the second one, and the pair of the row that is left. A tile too many has column num_n.
__device__ __forceinline__ PairedTile paired_tile(uint32_t index, uint32_t num_m, uint32_t num_n,
                                                  uint32_t group_m) {
  const uint32_t group_size = group_m * num_n, group = index / group_size;
  const uint32_t first_m = group * group_m, rows = min(num_m - first_m, group_m);
  const uint32_t paired_rows = rows & ~1u;
  const uint32_t in_group = index - group * group_size, columns = in_group / (2 * rows);
  uint32_t n = 2 * columns, m = in_group - n * rows;
  if (n + 1 < num_n && m - paired_rows < paired_rows) {
    m -= paired_rows;
    ++n;
  }
  const bool shares_weights = m < paired_rows;
  if (!shares_weights) {
    n += m % 2;
    m = rows - 1;
  }
  return {{static_cast<int>(first_m + m), static_cast<int>(n)}, shares_weights};
}

}  // namespace kernelcat
