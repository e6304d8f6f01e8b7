// How a warpgroup's sums of D^T leave: turned to rows of D in registers, 16 bytes a store.
#pragma once

#include <kernelcat/fragments.cuh>

#include "output.cuh"

namespace kernelcat {

// Columns `col` to `col` + 7 of a row of D; what lies outside is dropped. kVectors: rows begin at
// multiples of 16 bytes.
template <bool kVectors, typename Output>
__device__ __forceinline__ void store_eight(const Output& output, int row, int col,
                                            const uint4& eight) {
  const int d_cols = output.d_cols();
  if (row >= output.m || col >= d_cols) return;
  typename Output::T* address = output.d + static_cast<int64_t>(row) * d_cols + col;
  if constexpr (kVectors) {
    *reinterpret_cast<uint4*>(address) = eight;
  } else {
    uint16_t* halves = reinterpret_cast<uint16_t*>(address);
    uint64_t low = eight.x | static_cast<uint64_t>(eight.y) << 32;
    uint64_t high = eight.z | static_cast<uint64_t>(eight.w) << 32;
#pragma unroll 1
    for (int i = 0; i < 8 && col + i < d_cols; ++i) {
      halves[i] = static_cast<uint16_t>(low);
      low = low >> 16 | high << 48;
      high >>= 16;
    }
  }
}

// A warp's sums: 16 rows of W from `row` on, by kCols rows of A from `col` on.
template <int kCols, typename Output>
struct TransposedSums {
  using T = typename Output::T;
  const float (&sums)[kCols / 2];
  const Output& output;
  float scale, bias[2];  // of this lane's rows of W
  int row, col;

  __device__ __forceinline__ TransposedSums(const float (&sums)[kCols / 2], const Output& output,
                                            float scale, int row, int col)
      : sums(sums), output(output), scale(scale), row(row), col(col) {
    bias[0] = output.bias_at(row + lane_index() / 4);
    bias[1] = output.bias_at(row + lane_index() / 4 + 8);
  }

  // Both sums of a lane in block `j` of 8 rows of A, of its upper row of W or the lower.
  __device__ __forceinline__ float2 finished(int j, int lower) const {
    const float* z = &sums[4 * j + 2 * lower];
    const int a_row = col + 8 * j + lane_index() % 4 * 2;
    return {z[0] * output.row_scale(scale, a_row) + bias[lower],
            z[1] * output.row_scale(scale, a_row + 1) + bias[lower]};
  }

  // Rows of D, 8 x 8: of block `j`, and with pairs of columns in one both halves.
  __device__ __forceinline__ uint32_t matrix(int j, int lower) const {
    const float2 z = finished(j, lower);
    return transposed(pack<T>(Output::activated(z.x), Output::activated(z.y)));
  }

  // Gate and up are neighbouring rows of W, in lanes four apart: even rows take the pair of the
  // upper half, odd ones that of the lower.
  __device__ __forceinline__ uint32_t gated_matrix(int j) const {
    const int r = lane_index() / 4, q = lane_index() % 4;
    const bool odd = r % 2 == 1;
    const float2 upper = finished(j, 0), lower = finished(j, 1);
    const float other_x = __shfl_xor_sync(0xffffffff, odd ? upper.x : lower.x, 4);
    const float other_y = __shfl_xor_sync(0xffffffff, odd ? upper.y : lower.y, 4);
    const uint32_t word =
        odd ? pack<T>(Output::gated(other_x, lower.x), Output::gated(other_y, lower.y))
            : pack<T>(Output::gated(upper.x, other_x), Output::gated(upper.y, other_y));
    // Column c of D is with rows 2 c, or 2 (c - 4) + 1.
    return transposed(__shfl_sync(0xffffffff, word, (r % 4 * 2 + r / 4) * 4 + q));
  }

  // Groups of blocks of eight rows of A for which `is_own(group)`.
  template <bool kVectors, typename Predicate>
  __device__ __forceinline__ void store(Predicate is_own) const {
    constexpr int kBlocks = Output::kStoredBlocks;
    const int r = lane_index() / 4, own = lane_index() % 4;
#pragma unroll
    for (int j = 0; j < kCols / 8; j += kBlocks) {
      if (!is_own(j / kBlocks)) continue;
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Output::kPaired) {
          matrices[i] = gated_matrix(j + i);
        } else {
          matrices[i] = matrix(j + i / 2, i % 2);
        }
      }
      const uint4 eight = gather_rows(matrices);
      if constexpr (Output::kPaired) {
        store_eight<kVectors>(output, col + 8 * (j + own) + r, row / 2, eight);
      } else {
        store_eight<kVectors>(output, col + 8 * (j + own / 2) + r, row + own % 2 * 8, eight);
      }
    }
  }
};

// Sums of 64 rows of W from `row` on, by kCols rows of A from `col` on, times `scale`.
template <int kCols, typename Output, typename Predicate>
__device__ __forceinline__ void store_transposed(const float (&sums)[kCols / 2],
                                                 const Output& output, float scale, int row,
                                                 int col, Predicate is_own) {
  const TransposedSums<kCols, Output> tile(sums, output, scale, row + warp_index() % 4 * 16, col);
  if (output.d_cols() % 8 == 0 && is_aligned(output.d, 16)) {
    tile.template store<true>(is_own);
  } else {
    tile.template store<false>(is_own);
  }
}

}  // namespace kernelcat
