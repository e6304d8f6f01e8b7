// out = residual + the sum over slots, in order, of gates * y.
#include <kernelcat/pdl.cuh>
#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kCombinedCols = 4;  // columns of a thread

// Thread i of the grid has columns 4 i to 4 i + 3 of out.
template <typename T>
__global__ void __launch_bounds__(128)
    moe_mlp_combine(const float* y,      // (tokens, top_k, hidden)
                    const float* gates,  // (tokens, top_k)
                    const T* residual,   // (tokens, hidden) or null
                    T* out,              // (tokens, hidden)
                    int tokens, int top_k, int hidden) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCombinedCols;
  const int64_t token = first / hidden, col = first - token * hidden;
  grid_dependency_wait();
  launch_dependents();
  if (token >= tokens) return;
  float sums[kCombinedCols] = {};
  if (residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kCombinedCols; ++i) sums[i] = to_float(residual[first + i]);
  }
#pragma unroll 8
  for (int slot = 0; slot < top_k; ++slot) {
    const int64_t row = token * top_k + slot;
    const float gate = gates[row];
    const float4 four = *reinterpret_cast<const float4*>(y + row * hidden + col);
    sums[0] += gate * four.x;
    sums[1] += gate * four.y;
    sums[2] += gate * four.z;
    sums[3] += gate * four.w;
  }
  *reinterpret_cast<uint2*>(out + first) = {pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3])};
}

}  // namespace kernelcat
