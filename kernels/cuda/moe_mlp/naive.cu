// Both products, one warp for each element, one weight at a time. h is (tokens * top_k, inter).
#include <kernelcat/expert_weights.cuh>
#include <kernelcat/gating.cuh>
#include <kernelcat/quantize.cuh>
#include <kernelcat/warp_sum.cuh>

namespace kernelcat {

// Four columns of a block of 128 that a lane multiplies.
constexpr int kLaneCols = kScaleBlock / kWarpThreads;

// The values of `row` (k,) in columns first + lane + 32 i, zeros from column k on. With kQuantized
// they have made a round trip through float8, with one scale for the block.
template <bool kQuantized, typename T>
__device__ __forceinline__ void load_block(float (&values)[kLaneCols], const T* row, int64_t first,
                                           int64_t k) {
  float amax = kMinAmax;
#pragma unroll
  for (int i = 0; i < kLaneCols; ++i) {
    const int64_t col = first + lane_index() + i * kWarpThreads;
    values[i] = col < k ? to_float(row[col]) : 0.0f;
    amax = fmaxf(amax, fabsf(values[i]));
  }
  if constexpr (kQuantized) {
    amax = warp_max(amax);
    const float scale = scale_of(amax), inverse = inverse_of(amax);
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) {
      values[i] = to_float(quantized(values[i], inverse)) * scale;
    }
  }
}

// The products of `row` (k,) and kRows rows of weights from `first_row` on, in all lanes.
template <bool kQuantized, int kRows, typename T, typename Weights>
__device__ __forceinline__ void multiply_row(float (&sums)[kRows], const T* row,
                                             const Weights& weights, int64_t first_row, int64_t k) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0.0f;
  for (int64_t first = 0; first < k; first += kScaleBlock) {
    float values[kLaneCols];
    load_block<kQuantized>(values, row, first, k);
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) {
      const int64_t col = first + lane_index() + i * kWarpThreads;
      if (col >= k) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] += values[i] * weights.at(first_row + r, col);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = warp_sum(sums[r]) * weights.factor;
}

// Calls function(row, col) for the elements (rows, cols) of this warp.
template <typename Function>
__device__ __forceinline__ void for_each_element(int64_t rows, int64_t cols, Function function) {
  const int64_t num_warps = blockDim.x / kWarpThreads;
  for (int64_t i = blockIdx.x * num_warps + warp_index(); i < rows * cols;
       i += gridDim.x * num_warps) {
    function(i / cols, i % cols);
  }
}

// h = gated(x @ W1^T + bias1) of every assignment.
template <typename T, typename A, WeightFormat kFormat, bool kTiles, Gating kGating>
__global__ void __launch_bounds__(256)
    moe_mlp_naive_first(const T* x,                 // (tokens, hidden)
                        const void* w1,             // (experts, 2 * inter, hidden) in kFormat
                        const void* w1_scale,       // (experts, ...), or null
                        const float* global_scale,  // (experts,), or null
                        const T* bias1,             // (experts, 2 * inter), or null
                        const int* ids,             // (tokens, top_k)
                        T* h,                       // (tokens * top_k, inter)
                        int tokens, int top_k, int hidden, int inter) {
  using Weights = ExpertWeights<kFormat, kTiles, T, A>;
  const int64_t n = static_cast<int64_t>(inter) * 2;
  for_each_element(static_cast<int64_t>(tokens) * top_k, inter, [&](int64_t row, int64_t col) {
    const int64_t expert = ids[row];
    const auto weights = Weights::of(w1, w1_scale, global_scale, expert, n, hidden);
    float z[2];
    multiply_row<sizeof(A) == 1>(z, x + row / top_k * hidden, weights, 2 * col, hidden);
#pragma unroll
    for (int i = 0; i < 2; ++i) z[i] += bias1 ? to_float(bias1[expert * n + 2 * col + i]) : 0.0f;
    if (lane_index() == 0) h[row * inter + col] = from_float<T>(gated<kGating>(z[0], z[1]));
  });
}

// out = residual + the sum over slots, in order, of gates * (h @ W2^T + bias2).
template <typename T, typename A, WeightFormat kFormat, bool kTiles>
__global__ void __launch_bounds__(256)
    moe_mlp_naive_second(const T* h,                 // (tokens * top_k, inter)
                         const void* w2,             // (experts, hidden, inter) in kFormat
                         const void* w2_scale,       // (experts, ...), or null
                         const float* global_scale,  // (experts,), or null
                         const T* bias2,             // (experts, hidden), or null
                         const int* ids,             // (tokens, top_k)
                         const float* gates,         // (tokens, top_k)
                         const T* residual,          // (tokens, hidden), or null
                         T* out,                     // (tokens, hidden)
                         int tokens, int top_k, int hidden, int inter) {
  using Weights = ExpertWeights<kFormat, kTiles, T, A>;
  for_each_element(tokens, hidden, [&](int64_t token, int64_t col) {
    float sum = residual ? to_float(residual[token * hidden + col]) : 0.0f;
    for (int64_t row = token * top_k; row < (token + 1) * top_k; ++row) {
      const int64_t expert = ids[row];
      const auto weights = Weights::of(w2, w2_scale, global_scale, expert, hidden, inter);
      float y[1];
      multiply_row<sizeof(A) == 1>(y, h + row * inter, weights, col, inter);
      const float bias = bias2 ? to_float(bias2[expert * hidden + col]) : 0.0f;
      sum += gates[row] * (y[0] + bias);
    }
    if (lane_index() == 0) out[token * hidden + col] = from_float<T>(sum);
  });
}

}  // namespace kernelcat
