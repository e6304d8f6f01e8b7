// The epilogue: scales, bias and activation, before a result is rounded.
#pragma once

#include <kernelcat/epilogue.cuh>

namespace kernelcat {

// D = activation(global_scale * a_scale * sums + bias), row-major; (m, n), or (m, n / 2) for
// kSwiglu. `T` is D's element type; with kRowScale, A is float8 and every row of A has a scale.
template <typename T_, Activation kActivation, bool kRowScale>
struct Fp4Output {
  using T = T_;
  static constexpr bool kPaired = kActivation == Activation::kSwiglu;
  // Blocks of eight columns of D^T that a warp stores together. A block of 16 rows of W is two 8 x
  // 8 matrices of D, or one with kPaired; four matrices make rows of 16 bytes (gather_rows).
  static constexpr int kStoredBlocks = kPaired ? 4 : 2;
  static constexpr bool kGatesOnce = false;  // see DecodedOutput

  T* d;
  const float* global_scale;  // (1,), or null for MXFP4
  const float* a_scale;       // (m,), or null for A of 16 bits
  const T* bias;              // (n,) or null
  int m, n;

  __device__ __forceinline__ int d_cols() const { return kPaired ? n / 2 : n; }

  __device__ __forceinline__ float global() const {
    return global_scale == nullptr ? 1.0f : *global_scale;
  }

  // The factor of a row's sums: `scale`, with kRowScale times the row's scale; 0 past the last row.
  __device__ __forceinline__ float row_scale(float scale, int row) const {
    if constexpr (!kRowScale) return scale;
    return row < m ? scale * a_scale[row] : 0.0f;
  }

  __device__ __forceinline__ float bias_at(int col) const {
    return bias == nullptr || col >= n ? 0.0f : to_float(bias[col]);
  }

  // The activation of a column of the product, and of a pair of columns for kSwiglu.
  static __device__ __forceinline__ float activated(float z) { return activate<kActivation>(z); }
  static __device__ __forceinline__ float gated(float gate, float up) { return silu(gate) * up; }
};

}  // namespace kernelcat
