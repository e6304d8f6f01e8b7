// One warp for each row (a query token and head): neighbouring lanes take neighbouring elements of
// head_dim, and parts are added up one after another.
#include <kernelcat/sync.cuh>

#include "part_weights.cuh"

namespace kernelcat {

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(256) attn_merge_naive(const T* outs,  // (parts, rows, head_dim)
                                                        const float* lses,  // (parts, rows)
                                                        T* out,             // (rows, head_dim)
                                                        float* lse,         // (rows,)
                                                        int num_parts, int64_t num_rows) {
  constexpr int kLaneElements = kHeadDim / kWarpThreads;
  const int lane = lane_index();
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t row = first + threadIdx.x / kWarpThreads; row < num_rows; row += step) {
    PartWeights weights;
    float values[kLaneElements] = {};
    for (int part = 0; part < num_parts; ++part) {
      const int64_t part_row = part * num_rows + row;
      const float part_lse = lses[part_row];
      if (!has_keys(part_lse)) continue;
      const float rescale = weights.raise_max(part_lse), weight = weights.add(part_lse);
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        const float value = to_float(outs[part_row * kHeadDim + lane + i * kWarpThreads]);
        values[i] = values[i] * rescale + weight * value;
      }
    }
    const float factor = weights.factor();
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      out[row * kHeadDim + lane + i * kWarpThreads] = from_float<T>(values[i] * factor);
    }
    if (lane == 0) lse[row] = weights.lse();
  }
}

}  // namespace kernelcat
