// D = activation(A @ B^T + bias) + residual for few rows of A: the rows of B stream once through a
// ring in shared memory, and mma.sync multiplies them by A, which lies in registers.
#include <kernelcat/epilogue.cuh>
#include <kernelcat/streamed_product.cuh>

namespace kernelcat {

// A pair of results are two adjacent columns of A @ B^T: gate and up for kSwiglu.
template <typename T, Activation kActivation, bool kResidual>
struct GemmOutput {
  static constexpr bool kGated = kActivation == Activation::kSwiglu;
  static constexpr int kColumns = kGated ? 1 : 2;  // of D

  struct Extra {
    T bias[2], residual[2];
  };

  const T* bias;      // (n,) or null
  const T* residual;  // (m, d_cols) or null
  T* d;               // (m, d_cols)
  int n, d_cols;

  __device__ __forceinline__ void prepare() const {}

  // The first element of D, or of the residual, that comes of columns `col` and `col + 1`.
  __device__ __forceinline__ int64_t place(int row, int col) const {
    return static_cast<int64_t>(row) * d_cols + (kGated ? col / 2 : col);
  }

  __device__ __forceinline__ Extra load(int col, int row) const {
    Extra extra = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (bias != nullptr && col + i < n) extra.bias[i] = bias[col + i];
      if (kResidual && i < kColumns && col + i < n)
        extra.residual[i] = residual[place(row, col) + i];
    }
    return extra;
  }

  __device__ __forceinline__ void store(const Extra& extra, int col, int row, float2 z) const {
    const float sums[] = {z.x + to_float(extra.bias[0]), z.y + to_float(extra.bias[1])};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float value = activate<kActivation>(sums[i]);
      if constexpr (kGated) value = silu(sums[0]) * sums[1];
      if (kResidual) value += to_float(extra.residual[i]);
      if (col + i < n) d[place(row, col) + i] = from_float<T>(value);
    }
  }
};

template <typename T, Activation kActivation, bool kResidual, int kTokens, int kGroups,
          int kNumWarps, int kChunks, int kNumStages>
__global__ void __launch_bounds__((kNumWarps + 2) * kWarpThreads, 1)
    gemm_streamed(const T* a,         // (m, k)
                  const T* b,         // (n, k)
                  const T* bias,      // (n,) or null
                  const T* residual,  // (m, columns of d) or null
                  T* d,               // (m, n), or (m, n / 2) for kSwiglu
                  int m, int n, int k) {
  using Kind = ProductKind<T, RowNorm::kNone, kTokens, kGroups, kNumWarps, kChunks, kNumStages>;
  using Output = GemmOutput<T, kActivation, kResidual>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  auto& shared =
      *reinterpret_cast<ProductShared<Kind, typename Output::Extra>*>(dynamic_shared + padding);
  grid_dependency_wait();  // B may be what a kernel before this one wrote
  const ActivationRows<T> rows = {.x = a, .norm_weight = nullptr, .tokens = m, .k = k, .eps = 0.0f};
  run_streamed_product(shared, GroupRange::of_block(ceil_div(n, kGroupRows)), n,
                       WeightRows<T>{b, k}, rows,
                       Output{bias, residual, d, n, Output::kGated ? n / 2 : n});
}

}  // namespace kernelcat
