// 16 bytes a thread, several rows a block, several parts in flight; every byte is moved once.
#include <kernelcat/types.cuh>

#include "running_sum.cuh"

namespace kernelcat {

constexpr int kVector = 8;  // elements in 16 bytes

// head_dim / 8 threads take a row, which is a query token and head, kUnroll parts at a time. Where
// kEager, they ask for lses and results at once; else for the lses first, and then for the results
// of the parts that count.
template <typename T, int kHeadDim, int kThreads, int kUnroll, bool kEager>
__global__ void __launch_bounds__(kThreads)
    attn_merge_vectorized(const T* outs,      // (parts, rows, head_dim)
                          const float* lses,  // (parts, rows)
                          T* out,             // (rows, head_dim)
                          float* lse,         // (rows)
                          int parts, int64_t num_rows) {
  constexpr int kLanes = kHeadDim / kVector, kRows = kThreads / kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const int col = threadIdx.x % kLanes * kVector;
  if (row >= num_rows) return;
  const T* results = outs + row * kHeadDim + col;

  RunningSum sum;
  float values[kVector] = {};
  for (int part = 0; part < parts; part += kUnroll) {
    float part_lses[kUnroll];
    uint4 vectors[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      part_lses[i] = part + i < parts ? __ldg(lses + (part + i) * num_rows + row) : -kInfinity;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (kEager ? part + i < parts : is_seen(part_lses[i])) {
        const T* address = results + (part + i) * num_rows * kHeadDim;
        vectors[i] = __ldcs(reinterpret_cast<const uint4*>(address));
      }
    }

    float most = part_lses[0];
#pragma unroll
    for (int i = 1; i < kUnroll; ++i) most = fmaxf(most, part_lses[i]);
    const float kept = sum.raise(most);
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[j] *= kept;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (!is_seen(part_lses[i])) continue;  // also keeps the loads above together
      const float weight = sum.add(part_lses[i]);
      const T* elements = reinterpret_cast<const T*>(&vectors[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] += weight * to_float(elements[j]);
    }
  }

  const float factor = sum.factor();
  const auto pair = [&](int j) { return pack<T>(values[j] * factor, values[j + 1] * factor); };
  const uint4 vector = {pair(0), pair(2), pair(4), pair(6)};
  __stcs(reinterpret_cast<uint4*>(out + row * kHeadDim + col), vector);
  if (col == 0) lse[row] = sum.lse();
}

}  // namespace kernelcat
