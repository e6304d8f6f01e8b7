// The sums of DecodeMerge by several lanes a vector: each lane adds up a share of the parts, and
// lanes exchange their sums by shuffles. One thread for a vector of sixteen parts is a chain of 300
// instructions, at the very end of the kernel, where nothing hides it.
#pragma once

#include "decode_merge.cuh"

namespace kernelcat {

// `Merge` is a DecodeMerge. kLanes lanes, kVectors lanes apart, share a vector.
template <typename Merge, int kLanes>
struct LaneMerge {
  using Shared = typename Merge::Shared;
  using Rows = typename Merge::Rows;
  static constexpr int kVectors = kWarpThreads / kLanes;  // of a warp
  static constexpr int kStep = Merge::kThreads / kLanes;  // vectors of a thread block
  static_assert(Merge::kThreads % kWarpThreads == 0 && kWarpThreads % kLanes == 0);

  static __device__ __forceinline__ int first_vector() {
    return threadIdx.x / kWarpThreads * kVectors + lane_index() % kVectors;
  }
  // Which share of the parts the lane adds up.
  static __device__ __forceinline__ int share() { return lane_index() / kVectors; }

  // Vector `i` of all rows, of all warps, in all lanes that share it; all lanes of a warp call it.
  template <int kNumWarps>
  static __device__ __forceinline__ PartialSum sum_of_warps(const Shared& shared,
                                                            const uint8_t* accumulators,
                                                            int warp_bytes, const Rows& rows,
                                                            int i) {
    const int row = rows.accumulator_row(i / Rows::kVectors), vector = i % Rows::kVectors;
    Parts<kNumWarps / kLanes> found;
#pragma unroll
    for (int part = 0; part < kNumWarps / kLanes; ++part) {
      const int w = part * kLanes + share();
      const float* values = reinterpret_cast<const float*>(accumulators + w * warp_bytes);
      found.parts[part] = {
          .values = *reinterpret_cast<const float4*>(values + row * Merge::kPitch + 4 * vector),
          .row_max = shared.row_max[w][row],
          .row_sum = shared.row_sum[w][row]};
    }
    return over_lanes(found.sum());
  }

  // Vector `vector` of the inbox, of all kClusterSize thread blocks, likewise.
  template <int kClusterSize>
  static __device__ __forceinline__ PartialSum sum_of_received(const Shared& shared, int vector) {
    Parts<kClusterSize / kLanes> found;
#pragma unroll
    for (int part = 0; part < kClusterSize / kLanes; ++part) {
      const auto& received = shared.inbox[part * kLanes + share()][vector];
      found.parts[part] = {
          .values = received.values, .row_max = received.stats.x, .row_sum = received.stats.y};
    }
    return over_lanes(found.sum());
  }

 private:
  static __device__ __forceinline__ PartialSum over_lanes(PartialSum sum) {
    const float lane_max = sum.row_max;
    each_step([&](int step) { sum.row_max = fmaxf(sum.row_max, from(sum.row_max, step)); });
    const float weight = rescale_factor(lane_max, sum.row_max);
    sum.values.x *= weight, sum.values.y *= weight;
    sum.values.z *= weight, sum.values.w *= weight;
    sum.row_sum *= weight;
    each_step([&](int step) {
      sum.values.x += from(sum.values.x, step), sum.values.y += from(sum.values.y, step);
      sum.values.z += from(sum.values.z, step), sum.values.w += from(sum.values.w, step);
      sum.row_sum += from(sum.row_sum, step);
    });
    return sum;
  }
  template <typename Function>
  static __device__ __forceinline__ void each_step(Function function) {
#pragma unroll
    for (int step = kVectors; step < kWarpThreads; step *= 2) function(step);
  }
  static __device__ __forceinline__ float from(float value, int step) {
    return __shfl_xor_sync(0xffffffff, value, step);
  }
};

}  // namespace kernelcat
