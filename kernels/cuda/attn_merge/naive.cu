// One warp a row, which is a query token and head: lanes side by side on head_dim, one element at a
// time, one part after another.
#include <kernelcat/sync.cuh>

#include "running_sum.cuh"

namespace kernelcat {

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(256) attn_merge_naive(const T* outs,  // (parts, rows, head_dim)
                                                        const float* lses,  // (parts, rows)
                                                        T* out,             // (rows, head_dim)
                                                        float* lse,         // (rows)
                                                        int parts, int64_t num_rows) {
  constexpr int kPerLane = kHeadDim / kWarpThreads;
  const int lane = lane_index();
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t row = first + threadIdx.x / kWarpThreads; row < num_rows; row += step) {
    RunningSum sum;
    float values[kPerLane] = {};
    for (int part = 0; part < parts; ++part) {
      const int64_t part_row = part * num_rows + row;
      const float part_lse = lses[part_row];
      if (!is_seen(part_lse)) continue;
      const float kept = sum.raise(part_lse), weight = sum.add(part_lse);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float value = to_float(outs[part_row * kHeadDim + lane + i * kWarpThreads]);
        values[i] = values[i] * kept + weight * value;
      }
    }
    const float factor = sum.factor();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      out[row * kHeadDim + lane + i * kWarpThreads] = from_float<T>(values[i] * factor);
    }
    if (lane == 0) lse[row] = sum.lse();
  }
}

}  // namespace kernelcat
