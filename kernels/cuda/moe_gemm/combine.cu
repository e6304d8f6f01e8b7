// D[token] = residual + the sum over slots of gates * rows, in the order of the slots.
#include <kernelcat/pdl.cuh>
#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kVector = 8;  // columns of a thread
constexpr int kSlots = 4;   // rows that a thread loads at a time

// Stores eight values as T; only columns [col, n) of them where the row ends or is not aligned.
template <typename T>
__device__ __forceinline__ void store_columns(T* d, const float (&sums)[kVector], int count,
                                              bool is_aligned) {
  if (is_aligned && count >= kVector) {
    *reinterpret_cast<uint4*>(d) = {pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3]),
                                    pack<T>(sums[4], sums[5]), pack<T>(sums[6], sums[7])};
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) d[i] = from_float<T>(sums[i]);
  }
}

// Eight values of a row, from a multiple of 16 bytes on.
template <typename T>
__device__ __forceinline__ void load_columns(float (&values)[kVector], const T* source) {
  const uint4 eight = *reinterpret_cast<const uint4*>(source);
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = to_float(reinterpret_cast<const T*>(&eight)[i]);
}

// Thread block (x, y) computes columns from 8 * blockDim.x * y on of token x.
template <typename T>
__global__ void __launch_bounds__(128) moe_gemm_combine(const T* rows,  // (tokens * top_k, pitch)
                                                        const int* position,  // (tokens, top_k)
                                                        const float* gates,   // (tokens, top_k)
                                                        const T* residual,  // (tokens, n), or null
                                                        T* d,               // (tokens, n)
                                                        int top_k, int n, int pitch) {
  grid_dependency_wait();
  const int col = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (col >= n) return;
  const int64_t token = blockIdx.x, first = token * n + col;
  const bool is_aligned = n % kVector == 0 && kernelcat::is_aligned(d, 16);
  float sums[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sums[i] = residual != nullptr && col + i < n ? to_float(residual[first + i]) : 0.0f;
  }
  for (int slot = 0; slot < top_k; slot += kSlots) {
    float values[kSlots][kVector], gate[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int64_t assignment = token * top_k + slot + s;
      const int row = slot + s < top_k ? position[assignment] : -1;
      gate[s] = row >= 0 ? gates[assignment] : 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[s][i] = 0.0f;
      if (row >= 0) load_columns(values[s], rows + static_cast<int64_t>(row) * pitch + col);
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += gate[s] * values[s][i];
    }
  }
  store_columns(d + first, sums, n - col, is_aligned);
}

}  // namespace kernelcat
