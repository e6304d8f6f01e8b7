// Puts together rows that many blocks have parts of: a block for every 128 columns of a row, a warp
// for every 16th part.
#include <kernelcat/pdl.cuh>

#include "partials.cuh"

namespace kernelcat {

constexpr int kNumWarps = 16, kThreads = kNumWarps * kWarpThreads;
constexpr int kColumns = 4 * kWarpThreads, kItems = kLatent / kColumns;  // of a row
constexpr int kInFlight = 4;  // parts that a thread waits for together

// Of four columns of a row, relative to its largest score in base 2.
struct Sum {
  float4 values = {};
  float most = -kInfinity, total = 0.0f;

  __device__ __forceinline__ void add(float4 other, float2 most_and_total) {
    const float new_most = fmaxf(most, most_and_total.x);
    const float kept = rescale(most, new_most), factor = rescale(most_and_total.x, new_most);
    values.x = values.x * kept + other.x * factor;
    values.y = values.y * kept + other.y * factor;
    values.z = values.z * kept + other.z * factor;
    values.w = values.w * kept + other.w * factor;
    total = total * kept + most_and_total.y * factor;
    most = new_most;
  }
};

template <typename T, int kTileRows>
__global__ void __launch_bounds__(kThreads) flashmla_combine(float* memory,      // partials
                                                             const Task* tasks,  // (shares,)
                                                             T* out, float* lse, int num_shares) {
  __shared__ float4 values[kNumWarps][kWarpThreads];
  __shared__ float2 most_and_total[kNumWarps];
  __shared__ Task told[kThreads];
  __shared__ int shares[kThreads], num_tasks;
  grid_dependency_wait();
  launch_dependents();
  const Partials<kTileRows> partials = {memory};
  const int warp = warp_index(), lane = lane_index();
  if (threadIdx.x < num_shares) told[threadIdx.x] = tasks[threadIdx.x];
  __syncthreads();
  if (warp == 0) {  // lists the shares that have something to do
    int count = 0;
    for (int first = 0; first < num_shares; first += kWarpThreads) {
      const bool has = first + lane < num_shares && told[first + lane].num_parts > 0;
      const uint32_t all = __ballot_sync(0xffffffff, has);
      if (has) shares[count + __popc(all & ((1u << lane) - 1))] = first + lane;
      count += __popc(all);
    }
    if (lane == 0) num_tasks = count;
  }
  __syncthreads();

  for (int item = blockIdx.x; item < num_tasks * kTileRows * kItems; item += gridDim.x) {
    const int share = shares[item / (kTileRows * kItems)];
    const int row = item / kItems % kTileRows, column = item % kItems * kColumns + 4 * lane;
    const Task task = told[share];
    if (row >= task.num_rows) continue;
    Sum sum;
    for (int first = warp; first < task.num_parts; first += kInFlight * kNumWarps) {
      float4 found[kInFlight];
      float2 rows[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int part = first + i * kNumWarps;
        found[i] = {}, rows[i] = {-kInfinity, 0.0f};
        const int slot = Partials<kTileRows>::slot(share + part, part == 0);
        const auto* four = reinterpret_cast<const float4*>(partials.at(slot, row, column));
        if (part < task.num_parts) found[i] = __ldcg(four);
        if (part < task.num_parts) rows[i] = __ldcg(partials.most_and_total(slot, row));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) sum.add(found[i], rows[i]);
    }
    values[warp][lane] = sum.values;
    if (lane == 0) most_and_total[warp] = {sum.most, sum.total};
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int i = 1; i < kNumWarps; ++i) sum.add(values[i][lane], most_and_total[i]);
      const int64_t place = static_cast<int64_t>(task.first_row) + row;
      const RowEnd end = RowEnd::of(sum.most, sum.total);
      const uint2 four = {pack<T>(sum.values.x * end.factor, sum.values.y * end.factor),
                          pack<T>(sum.values.z * end.factor, sum.values.w * end.factor)};
      *reinterpret_cast<uint2*>(out + place * kLatent + column) = four;
      if (column == 0) lse[place] = end.lse;
    }
    __syncthreads();
  }
}

}  // namespace kernelcat
