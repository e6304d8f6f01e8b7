// Sums of D^T, of which a warpgroup has 64 columns of D: they are transposed to rows of D, in
// registers with 16 bytes a store, or on the way to shared memory, whence a bulk copy takes them.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// Stores columns `col` to `col` + 7 of row `row` of D; elements outside of D are not stored. With
// kVectors, rows begin at multiples of 16 bytes.
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

// A warp's sums of 16 rows of W from `row` on, by kCols rows of A from `col` on.
template <int kCols, typename Output>
struct TransposedSums {
  using T = typename Output::T;
  const float (&sums)[kCols / 2];
  const Output& output;
  float scale, bias[2];  // `bias` of this lane's two rows of W
  int row, col;

  __device__ __forceinline__ TransposedSums(const float (&sums)[kCols / 2], const Output& output,
                                            float scale, int row, int col)
      : sums(sums), output(output), scale(scale), row(row), col(col) {
    bias[0] = output.bias_at(row + lane_index() / 4);
    bias[1] = output.bias_at(row + lane_index() / 4 + 8);
  }

  // The lane's two sums, before the activation, in block `j` of 8 rows of A, of the upper row of W
  // or of the lower one.
  __device__ __forceinline__ float2 finished(int j, int lower) const {
    const float* z = &sums[4 * j + 2 * lower];
    const int a_row = col + 8 * j + lane_index() % 4 * 2;
    return {z[0] * output.row_scale(scale, a_row) + bias[lower],
            z[1] * output.row_scale(scale, a_row + 1) + bias[lower]};
  }

  // The 8 x 8 matrix of D^T of block `j` and of the eight upper or lower rows of W.
  __device__ __forceinline__ uint32_t transposed_matrix(int j, int lower) const {
    const float2 z = finished(j, lower);
    return pack<T>(Output::activated(z.x), Output::activated(z.y));
  }

  // The same matrix of D.
  __device__ __forceinline__ uint32_t matrix(int j, int lower) const {
    return transposed(transposed_matrix(j, lower));
  }

  // The 8 x 8 matrix of D of block `j` and of all 16 rows of W, for kSwiglu. Gate and up are
  // adjacent rows of W, in lanes four apart. Of such a pair of lanes, the one with an even row
  // computes the result of the upper rows, the one with an odd row that of the lower rows.
  __device__ __forceinline__ uint32_t gated_matrix(int j) const {
    const int r = lane_index() / 4, q = lane_index() % 4;
    const bool is_odd = r % 2 == 1;
    const float2 upper = finished(j, 0), lower = finished(j, 1);
    const float received_x = __shfl_xor_sync(0xffffffff, is_odd ? upper.x : lower.x, 4);
    const float received_y = __shfl_xor_sync(0xffffffff, is_odd ? upper.y : lower.y, 4);
    uint32_t word;
    if constexpr (Output::kGatesOnce) {
      const float2 gate = {is_odd ? received_x : upper.x, is_odd ? received_y : upper.y};
      const float2 up = {is_odd ? lower.x : received_x, is_odd ? lower.y : received_y};
      word = pack<T>(Output::gated(gate.x, up.x), Output::gated(gate.y, up.y));
    } else {  // ptxas makes two branches, and a warp goes through both
      word = is_odd
                 ? pack<T>(Output::gated(received_x, lower.x), Output::gated(received_y, lower.y))
                 : pack<T>(Output::gated(upper.x, received_x), Output::gated(upper.y, received_y));
    }
    // Column c of D is in the lanes of row 2 * c, or of row 2 * (c - 4) + 1 where c > 3.
    return transposed(__shfl_sync(0xffffffff, word, (r % 4 * 2 + r / 4) * 4 + q));
  }

  // Stores the groups of kStoredBlocks blocks of eight rows of A for which `is_owned(group)`.
  template <bool kVectors, typename Predicate>
  __device__ __forceinline__ void store(Predicate is_owned) const {
    constexpr int kBlocks = Output::kStoredBlocks;
    // gather_rows returns row `r` of matrix `index`.
    const int r = lane_index() / 4, index = lane_index() % 4;
#pragma unroll
    for (int j = 0; j < kCols / 8; j += kBlocks) {
      if (!is_owned(j / kBlocks)) continue;
      uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Output::kPaired) {
          matrices[i] = j + i < kCols / 8 ? gated_matrix(j + i) : 0;  // of rows that m excludes
        } else {
          matrices[i] = matrix(j + i / 2, i % 2);
        }
      }
      const uint4 eight = gather_rows(matrices);
      if constexpr (Output::kPaired) {
        store_eight<kVectors>(output, col + 8 * (j + index) + r, row / 2, eight);
      } else {
        store_eight<kVectors>(output, col + 8 * (j + index / 2) + r, row + index % 2 * 8, eight);
      }
    }
  }
};

// Writes a warpgroup's sums of 64 rows of W from `row` on, by kCols rows of A from `col` on, which
// are multiplied by `scale`, to shared memory as a swizzled box of D: kCols rows of 128 bytes.
template <int kCols, typename Output>
__device__ __forceinline__ void write_box(uint8_t* box, const float (&sums)[kCols / 2],
                                          const Output& output, float scale, int row, int col) {
  static_assert(!Output::kPaired && kCols % 16 == 0,
                "a warp writes 16 rows by 16 columns at a time");
  const int warp = warp_index() % 4, i = lane_index() / 8;
  const TransposedSums<kCols, Output> tile(sums, output, scale, row + warp * 16, col);
#pragma unroll
  for (int j = 0; j < kCols / 8; j += 2) {
    const uint32_t matrices[4] = {tile.transposed_matrix(j, 0), tile.transposed_matrix(j, 1),
                                  tile.transposed_matrix(j + 1, 0),
                                  tile.transposed_matrix(j + 1, 1)};
    const int box_row = 8 * (j + i / 2) + lane_index() % 8, unit = 2 * warp + i % 2;
    store_matrices<true>(shared_address(box) + swizzled<kRowBytes>(box_row * kRowBytes + 16 * unit),
                         matrices);
  }
}

// Stores a warpgroup's sums of 64 rows of W from `row` on, by kCols rows of A from `col` on, which
// are multiplied by `scale`.
template <int kCols, typename Output, typename Predicate>
__device__ __forceinline__ void store_transposed(const float (&sums)[kCols / 2],
                                                 const Output& output, float scale, int row,
                                                 int col, Predicate is_owned) {
  const TransposedSums<kCols, Output> tile(sums, output, scale, row + warp_index() % 4 * 16, col);
  if (output.d_cols() % 8 == 0 && is_aligned(output.d, 16)) {
    tile.template store<true>(is_owned);
  } else {
    tile.template store<false>(is_owned);
  }
}

}  // namespace kernelcat
