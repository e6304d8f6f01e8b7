// The order in which output tiles are computed.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

struct Tile {
  int m, n;
};

// Tile `index` when tiles run down columns of `group_m` tile rows: tiles computed at the same time
// then form a rectangle that shares operands in L2.
__device__ __forceinline__ Tile grouped_tile(int index, int num_m, int num_n, int group_m) {
  const int group = index / (group_m * num_n);
  const int first_m = group * group_m;
  const int rows = min(num_m - first_m, group_m);
  const int in_group = index - group * (group_m * num_n);
  return {first_m + in_group % rows, in_group / rows};
}

}  // namespace kernelcat
