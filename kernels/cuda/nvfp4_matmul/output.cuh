// What happens to a sum of products before it is rounded: scales, bias, activation.
#pragma once

#include <kernelcat/epilogue.cuh>

namespace kernelcat {

// D = activation(global_scale * a_scale * sums + bias), row-major; (m, n), or (m, n / 2) for
// kSwiglu. `T` is D's element type; kRowScale: A is float8, and has a scale a row.
template <typename T_, Activation kActivation, bool kRowScale>
struct Fp4Output {
  using T = T_;
  static constexpr bool kPaired = kActivation == Activation::kSwiglu;
  // Eight columns of D^T each, which make 16 bytes of a row of D: four matrices of 8 x 8, of the
  // halves of 16 rows of W, or of pairs of them.
  static constexpr int kStoredBlocks = kPaired ? 4 : 2;

  T* d;
  const float* global_scale;  // (1,), or null for MXFP4
  const float* a_scale;       // (m,), or null for A of 16 bits
  const T* bias;              // (n,) or null
  int m, n;

  __device__ __forceinline__ int d_cols() const { return kPaired ? n / 2 : n; }

  __device__ __forceinline__ float global() const {
    return global_scale == nullptr ? 1.0f : *global_scale;
  }

  // `scale` times what sums of a row are multiplied by besides; any number for rows that are not.
  __device__ __forceinline__ float row_scale(float scale, int row) const {
    if constexpr (!kRowScale) return scale;
    return row < m ? scale * a_scale[row] : 0.0f;
  }

  __device__ __forceinline__ float bias_at(int col) const {
    return bias == nullptr || col >= n ? 0.0f : to_float(bias[col]);
  }

  // Of a column of the product, or a pair of them: gate and what it gates.
  static __device__ __forceinline__ float activated(float z) { return activate<kActivation>(z); }
  static __device__ __forceinline__ float gated(float gate, float up) { return silu(gate) * up; }
};

}  // namespace kernelcat
