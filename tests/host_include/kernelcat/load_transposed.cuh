// The transposing variant of load_matrices on the host.
#pragma once

#include <kernelcat/mma.cuh>

namespace kernelcat {

inline void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t shared_address) {
  const auto* rows = host::exchange_in_warp(shared_address);
  const int first_row = lane_index() % 4 * 2, column = lane_index() / 4;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      std::memcpy(&pair[i], shared_pointer(rows[8 * m + first_row + i]) + 2 * column, 2);
    }
    std::memcpy(&matrices[m], pair, 4);
  }
}

}  // namespace kernelcat
