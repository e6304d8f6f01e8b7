// D = A @ B^T (+ bias), one thread an element.
#include <kernelcat/types.cuh>

namespace kernelcat {

template <typename T>
__global__ void __launch_bounds__(256) gemm_naive(const T* a,     // (m, k)
                                                  const T* b,     // (n, k)
                                                  const T* bias,  // (n,) or null
                                                  T* d,           // (m, n)
                                                  int m, int n, int k) {
  const int64_t num_elements = static_cast<int64_t>(m) * n;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_elements;
       i += step) {
    const int64_t row = i / n, col = i % n;
    float sum = 0.0f;
    for (int64_t j = 0; j < k; ++j) sum += to_float(a[row * k + j]) * to_float(b[col * k + j]);
    if (bias != nullptr) sum += to_float(bias[col]);
    d[i] = from_float<T>(sum);
  }
}

}  // namespace kernelcat
