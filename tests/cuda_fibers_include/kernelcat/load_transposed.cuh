// kernels/cuda/include/kernelcat/load_transposed.cuh on the host.
#pragma once

#include <kernelcat/mma.cuh>

namespace kernelcat {

// A lane's word of matrix i has column lane / 4 of rows 2 * (lane % 4) and the next one, whose
// addresses lanes 8 * i on pass.
inline void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t shared_address) {
  const auto addresses = host::exchange(shared_address);
  const int lane = host::current->thread % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const uint32_t row = addresses[8 * i + lane % 4 * 2 + j];
      std::memcpy(&pair[j], dynamic_shared + row + lane / 4 * 2, 2);
    }
    std::memcpy(&matrices[i], pair, 4);
  }
  __syncwarp();
}

}  // namespace kernelcat
