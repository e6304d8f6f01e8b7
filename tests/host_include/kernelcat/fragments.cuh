// The transpose of an 8x8 matrix that a warp holds, on the host.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

inline uint32_t transposed(uint32_t matrix) {
  const auto* words = host::exchange_in_warp(matrix);
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {  // element (column + i, row)
    const uint32_t word = words[(column + i) * 4 + row / 2];
    result |= (word >> row % 2 * 16 & 0xffff) << 16 * i;
  }
  return result;
}

}  // namespace kernelcat
