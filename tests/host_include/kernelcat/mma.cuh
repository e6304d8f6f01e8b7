// The product of a warp on the host, and loads of its operands, by PTX's tables of fragments.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// Four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
inline void load_matrices(uint32_t (&matrices)[4], uint32_t shared_address) {
  const auto* rows = host::exchange_in_warp(shared_address);
  for (int m = 0; m < 4; ++m) {
    const char* row = shared_pointer(rows[8 * m + lane_index() / 4]);
    std::memcpy(&matrices[m], row + lane_index() % 4 * 4, 4);
  }
}

// Element `half` (0 or 1) of a word of two.
template <typename T>
float element(uint64_t word, int half) {
  return to_float(host::bit_cast<T>(static_cast<uint16_t>(word >> 16 * half)));
}

template <typename T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b_low, b_high};
  uint32_t lanes[6][kWarpThreads];
  for (int i = 0; i < 6; ++i) {
    const auto* values = host::exchange_in_warp(words[i]);
    std::copy(values, values + kWarpThreads, lanes[i]);
  }
  for (int i = 0; i < 4; ++i) {
    const int row = lane_index() / 4 + i / 2 * 8, col = lane_index() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, is_high = k / 8;
      const float left = element<T>(lanes[2 * is_high + row / 8][row % 8 * 4 + lane], k % 2);
      d[i] += left * element<T>(lanes[4 + is_high][col * 4 + lane], k % 2);
    }
  }
}

}  // namespace kernelcat
