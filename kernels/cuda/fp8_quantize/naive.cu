// A warp for each block of scales, whose elements it reads twice, one by one.
#include <kernelcat/quantize.cuh>

namespace kernelcat {

// A block of scales is kBlockRows (1 or 128) x 128 elements.
template <typename T, int kBlockRows>
__global__ void __launch_bounds__(256)
    fp8_quantize_naive(const T* x,        // (m, k)
                       float8_e4m3fn* q,  // (m, k)
                       float* scale,      // (k / 128, m) for 1 x 128, else (m / 128, k / 128)
                       int m, int k) {
  const int64_t num_k = ceil_div(k, kScaleBlock), num_m = ceil_div(m, kBlockRows);
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < num_m * num_k; i += step) {
    const int64_t m_block = i / num_k, k_block = i % num_k;
    const int64_t row_begin = m_block * kBlockRows,
                  row_end = min(row_begin + kBlockRows, static_cast<int64_t>(m));
    const int64_t col_begin = k_block * kScaleBlock + lane_index();
    const int64_t col_end = min((k_block + 1) * kScaleBlock, static_cast<int64_t>(k));
    float amax = kMinAmax;
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (int64_t col = col_begin; col < col_end; col += kWarpThreads) {
        amax = fmaxf(amax, fabsf(to_float(x[row * k + col])));
      }
    }
    amax = warp_max(amax);
    const float inverse = inverse_of(amax);
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (int64_t col = col_begin; col < col_end; col += kWarpThreads) {
        q[row * k + col] = quantized(to_float(x[row * k + col]), inverse);
      }
    }
    const int64_t scale_idx = kBlockRows == 1 ? k_block * m + m_block : i;
    if (lane_index() == 0) scale[scale_idx] = scale_of(amax);
  }
}

}  // namespace kernelcat
