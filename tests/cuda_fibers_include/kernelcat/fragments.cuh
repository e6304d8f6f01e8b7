// kernels/cuda/include/kernelcat/fragments.cuh on the host: its own source but for the instruction.
#pragma once

#include <kernelcat/sync.cuh>

namespace host {

// movmatrix: lane l has columns 2 * (l % 4) and the next one of row l / 4.
inline uint32_t transposed(uint32_t matrix) {
  const std::vector<uint32_t> words = exchange(matrix);
  const int row = current->thread % 32 / 4, col = current->thread % 4 * 2;
  const auto element = [&](int r, int c) { return words[r * 4 + c / 2] >> c % 2 * 16 & 0xffff; };
  return element(col, row) | element(col + 1, row) << 16;
}

}  // namespace host

#define asm(...) result = host::transposed(matrix)
#include_next <kernelcat/fragments.cuh>
#undef asm
