// Merges partial results of rows, 128 columns of a row at a time: one warp adds up few parts, all
// warps of a thread block many, each of them every 16th part.
#include <kernelcat/pdl.cuh>

#include "row_item.cuh"

namespace kernelcat {

constexpr int kNumWarps = 16, kThreads = kNumWarps * kWarpThreads;
constexpr int kFewParts = 2 * kInFlight;

// The tasks of a launch; those with up to kFewParts parts are listed apart from the others.
struct Tasks {
  CombineTask tasks[kThreads];
  int teams[kThreads];  // with few parts from the front, with many from the back
  int num_few, num_many;

  // Runs in one warp.
  __device__ __forceinline__ void list(int num_teams) {
    const int lane = lane_index();
    const uint32_t before = (1u << lane) - 1;
    int few = 0, many = 0;
    for (int first = 0; first < num_teams; first += kWarpThreads) {
      const int team = first + lane, parts = team < num_teams ? tasks[team].num_parts : 0;
      const uint32_t is_few = __ballot_sync(0xffffffff, parts > 0 && parts <= kFewParts);
      const uint32_t is_many = __ballot_sync(0xffffffff, parts > kFewParts);
      if (is_few >> lane & 1) teams[few + __popc(is_few & before)] = team;
      if (is_many >> lane & 1) teams[kThreads - 1 - many - __popc(is_many & before)] = team;
      few += __popc(is_few), many += __popc(is_many);
    }
    if (lane == 0) num_few = few, num_many = many;
  }
};

template <typename T, int kTileRows>
__global__ void __launch_bounds__(kThreads)
    flashmla_combine(float* slots,                 // PartialResults::slots
                     const CombineTask* tasks_in,  // (teams,)
                     T* out,                       // (tokens, heads, 512)
                     float* lse,                   // (tokens, heads)
                     int num_teams) {
  using Item = RowItem<T, kTileRows>;
  __shared__ float4 values[kNumWarps][kWarpThreads];
  __shared__ float2 stats[kNumWarps];
  __shared__ Tasks tasks;
  grid_dependency_wait();
  launch_dependents();
  const PartialResults<kTileRows> partials = {.slots = slots};
  const int warp = warp_index(), lane = lane_index();
  if (threadIdx.x < num_teams) tasks.tasks[threadIdx.x] = tasks_in[threadIdx.x];
  __syncthreads();
  if (warp == 0) tasks.list(num_teams);
  __syncthreads();

  const int num_few = tasks.num_few * Item::kTaskItems,
            num_many = tasks.num_many * Item::kTaskItems;
  for (int i = warp * gridDim.x + blockIdx.x; i < num_few; i += kNumWarps * gridDim.x) {
    const int team = tasks.teams[i / Item::kTaskItems];
    const Item item(tasks.tasks[team], team, i);
    if (item.row < item.task.num_rows) item.store(item.sum(partials, 0, 1), out, lse);
  }
  for (int i = blockIdx.x; i < num_many; i += gridDim.x) {
    const int team = tasks.teams[kThreads - 1 - i / Item::kTaskItems];
    const Item item(tasks.tasks[team], team, i);
    if (item.row >= item.task.num_rows) continue;
    PartialSum sum = item.sum(partials, warp, kNumWarps);
    values[warp][lane] = sum.values;
    if (lane == 0) stats[warp] = {sum.row_max, sum.row_sum};
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int j = 1; j < kNumWarps; ++j)
        sum.add({.values = values[j][lane], .row_max = stats[j].x, .row_sum = stats[j].y});
      item.store(sum, out, lse);
    }
    __syncthreads();
  }
}

}  // namespace kernelcat
