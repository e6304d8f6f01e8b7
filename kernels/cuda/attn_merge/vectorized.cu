// 16 bytes a thread, several rows a thread block, several parts in flight; each byte is moved once.
#include "part_weights.cuh"

namespace kernelcat {

constexpr int kVector = 8;  // elements in 16 bytes

// A row is a query token and head. head_dim / 8 threads take a row, kUnroll parts at a time. With
// kEager they load lses and results together; otherwise lses first, then the results of the parts
// that have keys.
template <typename T, int kHeadDim, int kThreads, int kUnroll, bool kEager>
__global__ void __launch_bounds__(kThreads)
    attn_merge_vectorized(const T* outs,      // (parts, rows, head_dim)
                          const float* lses,  // (parts, rows)
                          T* out,             // (rows, head_dim)
                          float* lse,         // (rows,)
                          int num_parts, int64_t num_rows) {
  constexpr int kRowThreads = kHeadDim / kVector, kRows = kThreads / kRowThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads;
  const int col = threadIdx.x % kRowThreads * kVector;
  if (row >= num_rows) return;
  const T* results = outs + row * kHeadDim + col;

  PartWeights weights;
  float values[kVector] = {};
  for (int part = 0; part < num_parts; part += kUnroll) {
    float part_lses[kUnroll];
    uint4 vectors[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      part_lses[i] = part + i < num_parts ? __ldg(lses + (part + i) * num_rows + row) : -kInfinity;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (kEager ? part + i < num_parts : has_keys(part_lses[i])) {
        const T* address = results + (part + i) * num_rows * kHeadDim;
        vectors[i] = __ldcs(reinterpret_cast<const uint4*>(address));
      }
    }

    float max_lse = part_lses[0];
#pragma unroll
    for (int i = 1; i < kUnroll; ++i) max_lse = fmaxf(max_lse, part_lses[i]);
    const float rescale = weights.raise_max(max_lse);
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[j] *= rescale;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (!has_keys(part_lses[i])) continue;  // also keeps the loads above together
      const float weight = weights.add(part_lses[i]);
      const T* elements = reinterpret_cast<const T*>(&vectors[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] += weight * to_float(elements[j]);
    }
  }

  const float factor = weights.factor();
  const auto pair = [&](int j) { return pack<T>(values[j] * factor, values[j + 1] * factor); };
  const uint4 vector = {pair(0), pair(2), pair(4), pair(6)};
  __stcs(reinterpret_cast<uint4*>(out + row * kHeadDim + col), vector);
  if (col == 0) lse[row] = weights.lse();
}

}  // namespace kernelcat
