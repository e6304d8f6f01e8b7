// An item of a task: a warp's 128 columns of a row, of which a lane has four, and how its parts are
// added up.
#pragma once

#include <kernelcat/partial_sum.cuh>

#include "partial_results.cuh"

namespace kernelcat {

constexpr int kColumns = 4 * kWarpThreads, kItems = kLatent / kColumns;  // of a row
constexpr int kInFlight = 4;  // parts that a thread loads at once

template <typename T, int kTileRows>
struct RowItem {
  static constexpr int kTaskItems = kTileRows * kItems;
  CombineTask task;
  int team, row, column;

  __device__ __forceinline__ RowItem(const CombineTask& task, int team, int item)
      : task(task),
        team(team),
        row(item / kItems % kTileRows),
        column(item % kItems * kColumns + 4 * lane_index()) {}

  // Adds up every `step`th part, beginning with part `first`.
  __device__ __forceinline__ PartialSum sum(PartialResults<kTileRows> partials, int first,
                                            int step) const {
    PartialSum sum;
    for (; first < task.num_parts; first += kInFlight * step) {
      float4 values[kInFlight];
      float2 stats[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int part = first + i * step;
        values[i] = {}, stats[i] = {-kInfinity, 0.0f};
        const int slot = PartialResults<kTileRows>::slot(team + part, part == 0);
        const auto* four = reinterpret_cast<const float4*>(partials.values(slot, row, column));
        if (part < task.num_parts) values[i] = __ldcg(four);
        if (part < task.num_parts) stats[i] = __ldcg(partials.row_stats(slot, row));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        sum.add({.values = values[i], .row_max = stats[i].x, .row_sum = stats[i].y});
    }
    return sum;
  }

  __device__ __forceinline__ void store(const PartialSum& sum, T* out, float* lse) const {
    const int64_t out_row = static_cast<int64_t>(task.first_row) + row;
    const RowEnd end = RowEnd::of(sum.row_max, sum.row_sum);
    const uint2 four = {pack<T>(sum.values.x * end.factor, sum.values.y * end.factor),
                        pack<T>(sum.values.z * end.factor, sum.values.w * end.factor)};
    *reinterpret_cast<uint2*>(out + out_row * kLatent + column) = four;
    if (column == 0) lse[out_row] = end.lse;
  }
};

}  // namespace kernelcat
