// D = residual + sums that other launches have added up by atomics. Leaves zeros in the sums.
#include <kernelcat/pdl.cuh>
#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kVector = 4;  // columns of a thread

// Thread block (x, y) finishes columns from 4 * blockDim.x * y on of token x.
template <typename T>
__global__ void __launch_bounds__(128)
    moe_gemm_finish(float* sums,        // (tokens, pitch), pitch a multiple of 4
                    const T* residual,  // (tokens, n), or null
                    T* d,               // (tokens, n)
                    int n, int pitch) {
  grid_dependency_wait();
  const int col = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (col >= n) return;
  const int64_t token = blockIdx.x, first = token * n + col;
  float4& sum = *reinterpret_cast<float4*>(sums + token * pitch + col);
  const float values[kVector] = {sum.x, sum.y, sum.z, sum.w};
  sum = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (col + i >= n) break;
    const float value = residual == nullptr ? 0.0f : to_float(residual[first + i]);
    d[first + i] = from_float<T>(value + values[i]);
  }
}

}  // namespace kernelcat
