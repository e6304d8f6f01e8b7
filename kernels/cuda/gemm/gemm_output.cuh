// The epilogue of a matrix product: bias, activation, residual, rounding, and guarded stores.
#pragma once

#include <kernelcat/epilogue.cuh>

namespace kernelcat {

// The values of two 16-bit elements as they lie in memory, the first in the low half.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  const uint16_t halves[2] = {static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16)};
  return {to_float(*reinterpret_cast<const T*>(&halves[0])),
          to_float(*reinterpret_cast<const T*>(&halves[1]))};
}

// D = activation(Z + bias) + residual, row-major, where Z (m, n) is the product. D and the residual
// are (m, n), or (m, n / 2) where the activation makes one column of each pair (kPaired).
template <typename T, Activation kActivation = Activation::kNone, bool kResidual = false>
struct GemmOutput {
  static constexpr bool kPaired = kActivation == Activation::kSwiglu;

  T* d;           // (m, d_cols())
  const T* bias;  // (n,) or null
  int m, n;
  const T* residual = nullptr;  // (m, d_cols()), not read unless kResidual

  static __device__ __forceinline__ float activated(float z) { return activate<kActivation>(z); }

  __device__ __forceinline__ int d_cols() const { return kPaired ? n / 2 : n; }

  // The bias of columns `col` and `col` + 1 of Z; zero without a bias and outside Z.
  __device__ __forceinline__ float2 bias_at(int col) const {
    return {bias != nullptr && col < n ? to_float(bias[col]) : 0.0f,
            bias != nullptr && col + 1 < n ? to_float(bias[col + 1]) : 0.0f};
  }

  // The bits of element (row, col) of the residual; zero outside.
  __device__ __forceinline__ uint32_t residual_at(int row, int col) const {
    if (row >= m || col >= d_cols()) return 0;
    const int64_t offset = static_cast<int64_t>(row) * d_cols() + col;
    return reinterpret_cast<const uint16_t*>(residual)[offset];
  }

  // Elements (row, col) and (row, col + 1) of the residual, packed; col is even.
  __device__ __forceinline__ uint32_t residual_pair(int row, int col) const {
    const T* address = residual + static_cast<int64_t>(row) * d_cols() + col;
    if (row < m && col + 1 < d_cols() && is_aligned(address, 4)) {
      return *reinterpret_cast<const uint32_t*>(address);
    }
    return residual_at(row, col) | residual_at(row, col + 1) << 16;
  }

  // Stores elements (row, col) and (row, col + 1) of D, which are rounded and packed; col is even.
  // Elements outside D are dropped.
  __device__ __forceinline__ void store_pair(int row, int col, uint32_t pair) const {
    if (row >= m || col >= d_cols()) return;
    T* address = d + static_cast<int64_t>(row) * d_cols() + col;
    if (col + 1 < d_cols() && is_aligned(address, 4)) {
      *reinterpret_cast<uint32_t*>(address) = pair;
    } else {
      uint16_t* halves = reinterpret_cast<uint16_t*>(address);
      halves[0] = static_cast<uint16_t>(pair);
      if (col + 1 < d_cols()) halves[1] = static_cast<uint16_t>(pair >> 16);
    }
  }

  // Stores what follows from columns `col` and `col` + 1 of a row of Z, without bias; col is even.
  __device__ __forceinline__ void store_sums(int row, int col, float first, float second) const {
    const float2 b = bias_at(col);
    if constexpr (kPaired) {
      if (row >= m || col >= n) return;
      const uint16_t bits = kResidual ? residual_at(row, col / 2) : 0;
      const float value = silu(first + b.x) * (second + b.y);
      d[static_cast<int64_t>(row) * d_cols() + col / 2] = from_float<T>(value + unpack<T>(bits).x);
    } else {
      const float2 r = unpack<T>(kResidual ? residual_pair(row, col) : 0);
      store_pair(row, col, pack<T>(activated(first + b.x) + r.x, activated(second + b.y) + r.y));
    }
  }

  // Stores a lane's part of a 16 x 8 matrix of Z: columns `col` + {0, 1} of rows `row` and `row`
  // + 8.
  __device__ __forceinline__ void store_matrix(int row, int col, const float* sums) const {
    store_sums(row, col, sums[0], sums[1]);
    store_sums(row + 8, col, sums[2], sums[3]);
  }
};

}  // namespace kernelcat
