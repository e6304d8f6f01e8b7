// D = activation(A @ W^T + bias): one thread for each element decodes one weight at a time.
#include <kernelcat/fp4.cuh>
#include <kernelcat/fp8.cuh>

#include "output.cuh"

namespace kernelcat {

constexpr int kTileRows = 16, kTileCols = 64, kTileBytes = kTileRows * kTileCols / 2;

// `value` rounded to the type of a 16-bit A, in which the other variants multiply; not rounded for
// A in float8.
template <typename T>
__device__ __forceinline__ float as_operand(float value) {
  if constexpr (sizeof(T) == 2) return to_float(from_float<T>(value));
  return value;
}

// W's element (row, col), without the global scale. With kTiles, W is packed as
// reference/_fp4_tiles.py describes, else in rows.
template <bool kNvfp4, bool kTiles>
__device__ __forceinline__ float weight_at(const uint8_t* w, const uint8_t* w_scale, int64_t row,
                                           int64_t col, int64_t k) {
  constexpr int kBlock = kFp4Block<kNvfp4>, kScales = kTileCols / kBlock;
  if constexpr (kTiles) {
    const int64_t tile = row / kTileRows * ceil_div<int64_t>(k, kTileCols) + col / kTileCols;
    const int lane = row % 8 * 4 + col % 8 / 2;
    const int nibble = row % kTileRows / 8 + col % 16 / 8 * 2 + col % 2 * 4;
    const int byte = lane * 16 + col % kTileCols / 16 * 4 + nibble / 2;
    const int scale = (row % 8 * 2 + row % kTileRows / 8) * kScales + col % kTileCols / kBlock;
    return code_value(w[tile * kTileBytes + byte], nibble % 2) *
           scale_value<kNvfp4>(w_scale[tile * kTileRows * kScales + scale]);
  } else {
    return code_value(w[row * (k / 2) + col / 2], col % 2) *
           scale_value<kNvfp4>(w_scale[row * (k / kBlock) + col / kBlock]);
  }
}

template <typename T, typename TOut, bool kNvfp4, bool kTiles, Activation kActivation>
__global__ void __launch_bounds__(256)
    nvfp4_matmul_naive(const T* a,                 // (m, k)
                       const uint8_t* w,           // (n, k / 2), or tiles
                       const uint8_t* w_scale,     // (n, k / 16 or 32), or tiles
                       const float* global_scale,  // (1,), or null for MXFP4
                       const float* a_scale,       // (m,), or null for A of 16 bits
                       const TOut* bias,           // (n,) or null
                       TOut* d,                    // (m, n), or (m, n / 2) for kSwiglu
                       int m, int n, int k) {
  using Output = Fp4Output<TOut, kActivation, sizeof(T) == 1>;
  const Output output = {
      .d = d, .global_scale = global_scale, .a_scale = a_scale, .bias = bias, .m = m, .n = n};
  const float global = output.global();
  const auto sum_at = [&](int64_t row, int64_t col) {
    float sum = 0.0f;
    for (int64_t j = 0; j < k; ++j) {
      const float weight = weight_at<kNvfp4, kTiles>(w, w_scale, col, j, k);
      sum += to_float(a[row * k + j]) * as_operand<T>(weight);
    }
    return sum * output.row_scale(global, row) + output.bias_at(col);
  };
  const int64_t d_cols = output.d_cols(), num_elements = m * d_cols;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_elements;
       i += step) {
    const int64_t row = i / d_cols, col = i % d_cols;
    float value;
    if constexpr (Output::kPaired) {
      value = Output::gated(sum_at(row, 2 * col), sum_at(row, 2 * col + 1));
    } else {
      value = Output::activated(sum_at(row, col));
    }
    d[i] = from_float<TOut>(value);
  }
}

}  // namespace kernelcat
