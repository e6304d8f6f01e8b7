// A warp for each block of scales, whose values y it computes twice, one by one.
#include <kernelcat/epilogue.cuh>
#include <kernelcat/quantize.cuh>

namespace kernelcat {

// The value y = silu(gate) * up of the pair at `x`.
template <typename T>
__device__ __forceinline__ float gated(const T* x) {
  return silu(to_float(x[0])) * to_float(x[1]);
}

template <typename T>
__global__ void __launch_bounds__(256) fp8_swiglu_naive(const T* x,        // (m, n)
                                                        float8_e4m3fn* q,  // (m, n / 2)
                                                        float* scale,      // (n / 256, m)
                                                        int m, int n) {
  const int64_t cols = n / 2, num_blocks = ceil_div<int64_t>(cols, kScaleBlock);
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < m * num_blocks; i += step) {
    const int64_t row = i / num_blocks, block = i % num_blocks;
    const int64_t col_begin = block * kScaleBlock + lane_index();
    const int64_t col_end = min((block + 1) * kScaleBlock, cols);
    float amax = kMinAmax;
    for (int64_t col = col_begin; col < col_end; col += kWarpThreads) {
      amax = fmaxf(amax, fabsf(gated(x + row * n + 2 * col)));
    }
    amax = warp_max(amax);
    const float inverse = inverse_of(amax);
    for (int64_t col = col_begin; col < col_end; col += kWarpThreads) {
      q[row * cols + col] = quantized(gated(x + row * n + 2 * col), inverse);
    }
    if (lane_index() == 0) scale[block * m + row] = scale_of(amax);
  }
}

}  // namespace kernelcat
