// The end of a matrix product: bias, rounding, and guarded stores from registers.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// D (m, n), row-major, and an optional bias (n,).
template <typename T>
struct GemmOutput {
  T* d;
  const T* bias;  // null: none
  int m, n;

  // Of columns `col` and `col` + 1; zero where there is none.
  __device__ __forceinline__ float2 bias_at(int col) const {
    return {bias != nullptr && col < n ? to_float(bias[col]) : 0.0f,
            bias != nullptr && col + 1 < n ? to_float(bias[col + 1]) : 0.0f};
  }

  // Elements (row, col) and (row, col + 1), rounded and packed, col even; what lies outside D is
  // dropped.
  __device__ __forceinline__ void store_pair(int row, int col, uint32_t pair) const {
    if (row >= m || col >= n) return;
    T* address = d + static_cast<int64_t>(row) * n + col;
    if (col + 1 < n && is_aligned(address, 4)) {
      *reinterpret_cast<uint32_t*>(address) = pair;
    } else {
      uint16_t* halves = reinterpret_cast<uint16_t*>(address);
      halves[0] = static_cast<uint16_t>(pair);
      if (col + 1 < n) halves[1] = static_cast<uint16_t>(pair >> 16);
    }
  }

  // A lane's share of a 16 x 8 block of sums: columns `col` + {0, 1} of rows `row` and `row` + 8.
  __device__ __forceinline__ void store_block(int row, int col, const float* sums) const {
    const float2 bias = bias_at(col);
    store_pair(row, col, pack<T>(sums[0] + bias.x, sums[1] + bias.y));
    store_pair(row + 8, col, pack<T>(sums[2] + bias.x, sums[3] + bias.y));
  }
};

}  // namespace kernelcat
