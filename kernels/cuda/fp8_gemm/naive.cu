// D = A @ B^T with block scales, one thread for each element.
#include <kernelcat/fp8.cuh>

namespace kernelcat {

__global__ void __launch_bounds__(256) fp8_gemm_naive(const float8_e4m3fn* a,  // (m, k)
                                                      const float* a_scale,    // (k / 128, m)
                                                      const float8_e4m3fn* b,  // (n, k)
                                                      const float* b_scale,    // (n / 128, k / 128)
                                                      bfloat16* d,             // (m, n)
                                                      int m, int n, int k) {
  const int64_t num_elements = static_cast<int64_t>(m) * n;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t num_k = ceil_div(k, kScaleBlock);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_elements;
       i += step) {
    const int64_t row = i / n, col = i % n;
    float sum = 0.0f;
    for (int64_t k_block = 0; k_block < num_k; ++k_block) {
      const int64_t begin = k_block * kScaleBlock;
      const int64_t end = min(begin + kScaleBlock, static_cast<int64_t>(k));
      float product = 0.0f;
      for (int64_t j = begin; j < end; ++j) {
        product += to_float(a[row * k + j]) * to_float(b[col * k + j]);
      }
      sum += a_scale[k_block * m + row] * b_scale[col / kScaleBlock * num_k + k_block] * product;
    }
    d[i] = from_float<bfloat16>(sum);
  }
}

}  // namespace kernelcat
