// For few tokens, two kernels. The first multiplies attn by wo and adds to the residual; the second
// has thread blocks that multiply normalized rows by eight rows of the router, and thread blocks
// that store one normalized row. The second loads the router's weights while the first runs.
#include <kernelcat/streamed_product.cuh>

namespace kernelcat {

// Adds to the residual.
template <typename T>
struct ResidualOutput {
  struct Extra {
    T bias[2], residual[2];
  };

  const T* bias;  // (hidden,) or null
  T* residual;    // (tokens, hidden)
  int hidden;

  __device__ __forceinline__ void prepare() const {}

  __device__ __forceinline__ Extra load(int row, int token) const {
    Extra extra = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + i >= hidden) continue;
      if (bias != nullptr) extra.bias[i] = bias[row + i];
      extra.residual[i] = residual[static_cast<int64_t>(token) * hidden + row + i];
    }
    return extra;
  }

  __device__ __forceinline__ void store(const Extra& extra, int row, int token, float2 z) const {
    T* target = residual + static_cast<int64_t>(token) * hidden + row;
    const float products[] = {z.x, z.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = products[i] + to_float(extra.bias[i]);
      if (row + i < hidden) target[i] = from_float<T>(to_float(extra.residual[i]) + sum);
    }
  }
};

template <typename T>
struct RouterOutput {
  struct Extra {
    T bias[2];
  };

  const T* bias;  // (experts,) or null
  float* logits;  // (tokens, experts)
  int experts;

  __device__ __forceinline__ void prepare() const {}

  __device__ __forceinline__ Extra load(int row, int) const {
    Extra extra = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (bias != nullptr && row + i < experts) extra.bias[i] = bias[row + i];
    }
    return extra;
  }

  __device__ __forceinline__ void store(const Extra& extra, int row, int token, float2 z) const {
    float* target = logits + static_cast<int64_t>(token) * experts + row;
    target[0] = z.x + to_float(extra.bias[0]);
    if (row + 1 < experts) target[1] = z.y + to_float(extra.bias[1]);
  }
};

template <typename T, int kTokens, int kGroups, int kNumWarps, int kChunks, int kNumStages>
__global__ void __launch_bounds__((kNumWarps + 2) * kWarpThreads, 1)
    out_router_project(const T* attn,  // (tokens, width)
                       const T* wo,    // (hidden, width)
                       const T* bo,    // (hidden,) or null
                       T* residual,    // (tokens, hidden)
                       int tokens, int width, int hidden) {
  using Kind = ProductKind<T, RowNorm::kNone, kTokens, kGroups, kNumWarps, kChunks, kNumStages>;
  using Output = ResidualOutput<T>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  auto& shared =
      *reinterpret_cast<ProductShared<Kind, typename Output::Extra>*>(dynamic_shared + padding);
  const ActivationRows<T> rows = {
      .x = attn, .norm_weight = nullptr, .tokens = tokens, .k = width, .eps = 0.0f};
  run_streamed_product(shared, GroupRange::of_block(ceil_div(hidden, kGroupRows)), hidden,
                       WeightRows<T>{wo, width}, rows, Output{bo, residual, hidden});
}

// Stores the normalized row of `token`. All threads of the thread block call this; `sums` has a
// float for each warp, in shared memory.
template <typename T>
__device__ __forceinline__ void store_normalized(const ActivationRows<T>& rows, int token, T* x,
                                                 float* sums) {
  float sum = 0.0f;
  for (int col = threadIdx.x * 8; col < rows.k; col += blockDim.x * 8) {
    sum += sum_squares<T>(*rows.at(token, col));
  }
  sum = warp_sum(sum);
  const int warp_idx = warp_index();
  if (lane_index() == 0) sums[warp_idx] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int i = 0; i < blockDim.x / kWarpThreads; ++i) sum += sums[i];
  const float factor = rows.inverse_root(sum);
  for (int col = threadIdx.x * 8; col < rows.k; col += blockDim.x * 8) {
    const uint4 weights = __ldg(reinterpret_cast<const uint4*>(rows.norm_weight + col));
    *reinterpret_cast<uint4*>(x + static_cast<int64_t>(token) * rows.k + col) =
        scaled<T>(*rows.at(token, col), factor, weights);
  }
}

// The first thread blocks have eight experts and up to kTokens tokens, the others a token.
template <typename T, int kTokens, int kNumWarps, int kChunks, int kNumStages>
__global__ void __launch_bounds__((kNumWarps + 2) * kWarpThreads, 1)
    out_router_route(const T* residual,     // h (tokens, hidden)
                     const T* norm_weight,  // (hidden,)
                     const T* router,       // (experts, hidden)
                     const T* router_bias,  // (experts,) or null
                     T* x,                  // (tokens, hidden)
                     float* logits,         // (tokens, experts)
                     int tokens, int hidden, int experts, float eps) {
  using Kind = ProductKind<T, kRowNorm<T>, kTokens, 1, kNumWarps, kChunks, kNumStages>;
  using Output = RouterOutput<T>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  auto& shared =
      *reinterpret_cast<ProductShared<Kind, typename Output::Extra>*>(dynamic_shared + padding);
  const int num_groups = ceil_div(experts, kGroupRows);
  const int num_products = num_groups * ceil_div(tokens, kTokens);
  ActivationRows<T> rows = {
      .x = residual, .norm_weight = norm_weight, .tokens = tokens, .k = hidden, .eps = eps};
  if (blockIdx.x >= num_products) {
    launch_dependents();
    grid_dependency_wait();
    store_normalized(rows, blockIdx.x - num_products, x, reinterpret_cast<float*>(&shared));
    return;
  }
  const int group = blockIdx.x % num_groups, first_token = blockIdx.x / num_groups * kTokens;
  rows.x += static_cast<int64_t>(first_token) * hidden;
  rows.tokens = min(kTokens, tokens - first_token);
  float* first_logits = logits + static_cast<int64_t>(first_token) * experts;
  run_streamed_product(shared, GroupRange{group, group + 1}, experts, WeightRows<T>{router, hidden},
                       rows, Output{router_bias, first_logits, experts});
}

}  // namespace kernelcat
