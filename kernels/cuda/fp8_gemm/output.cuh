// The epilogue: accumulators go from registers to D, without shared memory.
#pragma once

#include <kernelcat/fragments.cuh>

namespace kernelcat {

// D (m, n), row-major.
struct Fp8Output {
  bfloat16* d;  // (m, n)
  int m, n;
  bool is_aligned;  // whether every row begins at a multiple of 16 bytes

  // Stores columns `col` to `col` + 7 of a row, `col` a multiple of 8. Elements outside D are
  // dropped.
  __device__ __forceinline__ void store(int row, int col, const uint4& eight) const {
    if (row >= m || col >= n) return;
    bfloat16* address = d + static_cast<int64_t>(row) * n + col;
    if (is_aligned) {
      *reinterpret_cast<uint4*>(address) = eight;
      return;
    }
    uint16_t* halves = reinterpret_cast<uint16_t*>(address);
    uint64_t low = eight.x | static_cast<uint64_t>(eight.y) << 32;
    uint64_t high = eight.z | static_cast<uint64_t>(eight.w) << 32;
#pragma unroll 1
    for (int i = 0; i < 8 && col + i < n; ++i) {
      halves[i] = static_cast<uint16_t>(low);
      low = low >> 16 | high << 48;
      high >>= 16;
    }
  }
};

// Stores 64 x kCols sums, 16 bytes at a time. `row` is that of the first sum among the rows of the
// left operand, `col` among those of the right operand.
template <int kCols, bool kSwap>
__device__ __forceinline__ void store_sums(const float (&sums)[kCols / 2], const Fp8Output& output,
                                           int row, int col) {
  static_assert(kSwap || kCols % 32 == 0);
  const int lane = lane_index(), warp_row = row + warp_index() % 4 * 16;
  if constexpr (kSwap) {
#pragma unroll
    for (int j = 0; j < kCols; j += 16) {
      uint32_t matrices[4];  // 8 x 8 of D: [columns of the tile / 8][rows of the tile / 8]
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &sums[(j + i / 2 * 8) / 2 + i % 2 * 2];
        matrices[i] = transposed(pack<bfloat16>(pair[0], pair[1]));
      }
      const int matrix = lane % 4;  // of which gather_rows() returns a row to this lane
      output.store(col + j + matrix / 2 * 8 + lane / 4, warp_row + matrix % 2 * 8,
                   gather_rows(matrices));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCols; j += 32) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t matrices[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &sums[(j + i * 8) / 2 + h * 2];
          matrices[i] = pack<bfloat16>(pair[0], pair[1]);
        }
        output.store(warp_row + 8 * h + lane / 4, col + j + lane % 4 * 8, gather_rows(matrices));
      }
    }
  }
}

}  // namespace kernelcat
