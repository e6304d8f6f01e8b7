// Merges partial results of rows that several teams share, as flashmla_combine does, but all rows
// at the same time: each item has as many warps as load its parts at once, and only rows that a
// task has are items. A thread block merges a batch of items of one task at a time.
#include <kernelcat/pdl.cuh>

#include "row_item.cuh"

namespace kernelcat {

constexpr int kNumWarps = 16, kThreads = kNumWarps * kWarpThreads;

// The batches of a team's task.
struct MergeTask {
  CombineTask task;
  int team;
  int item_warps;  // of an item; a power of two
  int first_batch, num_batches;

  // `first_batch` is not known yet.
  static __device__ __forceinline__ MergeTask of(const CombineTask& task, int team) {
    MergeTask merge = {.task = task, .team = team, .item_warps = 1};
    while (merge.item_warps < kNumWarps && kInFlight * merge.item_warps < task.num_parts) {
      merge.item_warps *= 2;
    }
    if (task.num_parts > 0) {
      merge.num_batches = ceil_div(task.num_rows * kItems * merge.item_warps, kNumWarps);
    }
    return merge;
  }
  __device__ __forceinline__ int end() const { return first_batch + num_batches; }
};

struct MergeShared {
  float4 values[kNumWarps][kWarpThreads];
  float2 stats[kNumWarps];
  int warp_batches[kNumWarps];
  MergeTask merge[2];  // that has the thread block's batch, by turns

  // Batches of all tasks; sets `merge.first_batch` of the thread's task. All threads call it.
  __device__ __forceinline__ int count(MergeTask& merge) {
    const int lane = lane_index(), warp = warp_index();
    int end = merge.num_batches;
#pragma unroll
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const int below = __shfl_up_sync(0xffffffff, end, step);
      if (lane >= step) end += below;
    }
    if (lane == kWarpThreads - 1) warp_batches[warp] = end;
    __syncthreads();
    int all = 0;
    merge.first_batch = end - merge.num_batches;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      if (i < warp) merge.first_batch += warp_batches[i];
      all += warp_batches[i];
    }
    return all;
  }
};

// `slots` are those of PartialResults; `tasks`: (teams,), `out`: (tokens, heads, 512), `lse`:
// (tokens, heads).
template <typename T, int kTileRows>
__global__ void __launch_bounds__(kThreads)
    flashmla_merge(float* slots, const CombineTask* tasks, T* out, float* lse, int num_teams) {
  static __shared__ MergeShared shared;
  grid_dependency_wait();
  launch_dependents();
  const PartialResults<kTileRows> partials = {.slots = slots};
  const int warp = warp_index(), lane = lane_index(), thread = static_cast<int>(threadIdx.x);
  MergeTask own = MergeTask::of(thread < num_teams ? tasks[thread] : CombineTask{}, thread);
  const int num_batches = shared.count(own);
  for (int batch = blockIdx.x, turn = 0; batch < num_batches; batch += gridDim.x, turn ^= 1) {
    if (own.first_batch <= batch && batch < own.end()) shared.merge[turn] = own;
    __syncthreads();
    const MergeTask merge = shared.merge[turn];
    const int first_item = (batch - merge.first_batch) * (kNumWarps / merge.item_warps);
    const int part = warp % merge.item_warps;
    const RowItem<T, kTileRows> item(merge.task, merge.team, first_item + warp / merge.item_warps);
    const bool is_inside = item.row < merge.task.num_rows;
    PartialSum sum;
    if (is_inside) sum = item.sum(partials, part, merge.item_warps);
    if (merge.item_warps > 1) {
      shared.values[warp][lane] = sum.values;
      if (lane == 0) shared.stats[warp] = {sum.row_max, sum.row_sum};
      __syncthreads();
    }
    if (is_inside && part == 0) {
      for (int i = warp + 1; i < warp + merge.item_warps; ++i) {
        const float2 stats = shared.stats[i];
        sum.add({.values = shared.values[i][lane], .row_max = stats.x, .row_sum = stats.y});
      }
      item.store(sum, out, lse);
    }
  }
}

}  // namespace kernelcat
