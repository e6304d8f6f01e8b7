// D = activation(A @ B^T + bias) + residual, one thread for each element.
#include <kernelcat/epilogue.cuh>

namespace kernelcat {

template <typename T, Activation kActivation, bool kResidual>
__global__ void __launch_bounds__(256) gemm_naive(const T* a,         // (m, k)
                                                  const T* b,         // (n, k)
                                                  const T* bias,      // (n,) or null
                                                  const T* residual,  // (m, columns of d) or null
                                                  T* d,  // (m, n), or (m, n / 2) for kSwiglu
                                                  int m, int n, int k) {
  const auto sum_at = [&](int64_t row, int64_t col) {
    float sum = 0.0f;
    for (int64_t j = 0; j < k; ++j) sum += to_float(a[row * k + j]) * to_float(b[col * k + j]);
    return bias == nullptr ? sum : sum + to_float(bias[col]);
  };
  const int d_cols = kActivation == Activation::kSwiglu ? n / 2 : n;
  const int64_t num_elements = static_cast<int64_t>(m) * d_cols;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_elements;
       i += step) {
    const int64_t row = i / d_cols, col = i % d_cols;
    float value;
    if constexpr (kActivation == Activation::kSwiglu) {
      value = silu(sum_at(row, 2 * col)) * sum_at(row, 2 * col + 1);
    } else {
      value = activate<kActivation>(sum_at(row, col));
    }
    if constexpr (kResidual) value += to_float(residual[i]);
    d[i] = from_float<T>(value);
  }
}

}  // namespace kernelcat
