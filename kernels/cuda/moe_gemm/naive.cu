// Products of rows grouped by expert: one thread for each element of D.
#include <kernelcat/expert_weights.cuh>
#include <kernelcat/gating.cuh>

namespace kernelcat {

// The expert that serves `row`; experts without rows are passed over.
__device__ __forceinline__ int expert_of(int row, const int* offsets) {
  int expert = 0;
  while (row >= offsets[expert + 1]) ++expert;
  return expert;
}

// `A` is T, or float8_e4m3fn with a scale for each row and 128 columns.
template <typename T, typename A, WeightFormat kFormat, bool kTiles, Gating kGating, bool kGather,
          bool kCombine>
__global__ void __launch_bounds__(256)
    moe_gemm_naive(const A* a,                 // (a_rows, k)
                   const float* a_scale,       // (k / 128, a_rows), or null
                   const void* w,              // (experts, n, k) in kFormat
                   const void* w_scale,        // (experts, ...), or null
                   const float* global_scale,  // (experts,), or null
                   const T* bias,              // (experts, n), or null
                   const int* offsets,         // (experts + 1,)
                   const int* order,           // (tokens * top_k,)
                   const int* position,        // (tokens, top_k), for kCombine
                   const float* gates,         // (tokens, top_k), for kCombine
                   const T* residual,          // (tokens, columns of d), or null
                   T* d,                       // (tokens or tokens * top_k, n, or n / 2 if gated)
                   int tokens, int top_k, int experts, int n, int k) {
  using Weights = ExpertWeights<kFormat, kTiles, T, A>;
  const int64_t a_rows = kGather ? tokens : static_cast<int64_t>(tokens) * top_k;
  const int64_t d_rows = kCombine ? tokens : static_cast<int64_t>(tokens) * top_k;
  const int64_t d_cols = kIsGated<kGating> ? n / 2 : n;

  // Element (row, col) of the product plus bias; `row` is a row of `expert`.
  const auto z = [&](int row, int expert, int64_t col) {
    const auto weights = Weights::of(w, w_scale, global_scale, expert, n, k);
    const int64_t a_row = kGather ? order[row] / top_k : row;
    float sum = 0.0f;
    for (int64_t j = 0; j < k; ++j) {
      float value = to_float(a[a_row * k + j]);
      if constexpr (sizeof(A) == 1) value *= a_scale[j / kScaleBlock * a_rows + a_row];
      sum += value * weights.at(col, j);
    }
    sum *= weights.factor;
    return bias == nullptr ? sum : sum + to_float(bias[static_cast<int64_t>(expert) * n + col]);
  };
  const auto y = [&](int row, int64_t col) {
    const int expert = expert_of(row, offsets);
    if constexpr (kIsGated<kGating>) {
      return gated<kGating>(z(row, expert, 2 * col), z(row, expert, 2 * col + 1));
    } else {
      return z(row, expert, col);
    }
  };
  const auto weighted_sum = [&](int64_t token, int64_t col) {
    float sum = residual == nullptr ? 0.0f : to_float(residual[token * d_cols + col]);
    for (int slot = 0; slot < top_k; ++slot) {
      const int row = position[token * top_k + slot];
      if (row >= 0) sum += gates[token * top_k + slot] * y(row, col);
    }
    return sum;
  };

  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < d_rows * d_cols;
       i += step) {
    const int64_t row = i / d_cols, col = i % d_cols;
    float value = 0.0f;  // of rows without an assignment
    if constexpr (kCombine) {
      value = weighted_sum(row, col);
    } else if (row < offsets[experts]) {
      value = y(row, col);
    }
    d[i] = from_float<T>(value);
  }
}

}  // namespace kernelcat
