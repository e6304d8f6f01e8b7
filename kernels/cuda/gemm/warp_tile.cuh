// The part of a tile that one warp multiplies by mma.sync, from operands in shared memory.
#pragma once

#include <kernelcat/mma.cuh>
#include <kernelcat/sync.cuh>

#include "gemm_output.cuh"

namespace kernelcat {

// The accumulators of kRows x kCols sums. Of each 16 x 8 matrix lane l holds columns 2 * (l % 4) +
// {0, 1} of rows l / 4 and l / 4 + 8.
template <typename T, int kRows, int kCols>
struct WarpTile {
  static_assert(kRows % 16 == 0 && kCols % 16 == 0);
  float sums[kRows / 16][kCols / 8][4] = {};

  // Adds the products of 16 columns of A and B. `a_at(row, unit)` and `b_at(row, unit)` are the
  // shared-memory addresses of the first (unit 0) and second (1) 16 bytes of these columns, in a
  // row of the warp's part of the operand.
  template <typename AddressA, typename AddressB>
  __device__ __forceinline__ void multiply(AddressA a_at, AddressB b_at) {
    const int lane = lane_index();
    uint32_t a[kRows / 16][4], b[kCols / 16][4];
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) load_matrices(a[i], a_at(16 * i + lane % 16, lane / 16));
#pragma unroll
    for (int j = 0; j < kCols / 16; ++j) {
      load_matrices(b[j], b_at(16 * j + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kCols / 16; ++j) {
        mma_16x8x16<T>(sums[i][2 * j], a[i], b[j][0], b[j][1]);
        mma_16x8x16<T>(sums[i][2 * j + 1], a[i], b[j][2], b[j][3]);
      }
    }
  }

  // Stores the sums, the first of which belongs to (`row`, `col`) of Z; `output` is a GemmOutput.
  template <typename Output>
  __device__ __forceinline__ void store(const Output& output, int row, int col) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        output.store_matrix(row + 16 * i + lane / 4, col + 8 * j + lane % 4 * 2, sums[i][j]);
      }
    }
  }
};

}  // namespace kernelcat
