// Three kernels: a warp for each element of h, for each row of x, and for each logit.
#include <kernelcat/sync.cuh>
#include <kernelcat/warp_sum.cuh>

namespace kernelcat {

constexpr int kThreads = 256;

// The number of this warp among the warps of the whole grid.
__device__ __forceinline__ int64_t grid_warp() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarpThreads;
}

// The product of two rows of `length` elements, in all lanes of the warp.
template <typename T>
__device__ __forceinline__ float product(const T* a, const T* b, int length) {
  float sum = 0.0f;
  for (int i = lane_index(); i < length; i += kWarpThreads) {
    sum = fmaf(to_float(a[i]), to_float(b[i]), sum);
  }
  return warp_sum(sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) out_router_project(const T* attn,  // (tokens, width)
                                                               const T* wo,    // (hidden, width)
                                                               const T* bo,    // (hidden,) or null
                                                               T* residual,    // (tokens, hidden)
                                                               int tokens, int width, int hidden) {
  const int64_t element = grid_warp(), token = element / hidden;
  const int col = element % hidden;
  if (token >= tokens) return;
  const float sum = product(attn + token * width, wo + static_cast<int64_t>(col) * width, width);
  const float bias = bo == nullptr ? 0.0f : to_float(bo[col]);
  if (lane_index() != 0) return;
  residual[element] = from_float<T>(to_float(residual[element]) + (sum + bias));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    out_router_normalize(const T* residual,     // (tokens, hidden)
                         const T* norm_weight,  // (hidden,)
                         T* x,                  // (tokens, hidden)
                         int tokens, int hidden, float eps) {
  const int64_t token = grid_warp();
  if (token >= tokens) return;
  const T* h = residual + token * hidden;
  const float root = sqrtf(product(h, h, hidden) / hidden + eps);
  for (int i = lane_index(); i < hidden; i += kWarpThreads) {
    x[token * hidden + i] = from_float<T>(to_float(h[i]) / root * to_float(norm_weight[i]));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    out_router_route(const T* x,            // (tokens, hidden)
                     const T* router,       // (experts, hidden)
                     const T* router_bias,  // (experts,) or null
                     float* logits,         // (tokens, experts)
                     int tokens, int hidden, int experts) {
  const int64_t element = grid_warp(), token = element / experts;
  const int expert = element % experts;
  if (token >= tokens) return;
  const T* weights = router + static_cast<int64_t>(expert) * hidden;
  const float sum = product(x + token * hidden, weights, hidden);
  const float bias = router_bias == nullptr ? 0.0f : to_float(router_bias[expert]);
  if (lane_index() == 0) logits[element] = sum + bias;
}

}  // namespace kernelcat
