// Puts together rows that many blocks have parts of: a block for every two columns a thread, four
// groups of threads side by side on the parts.
#include <kernelcat/pdl.cuh>

#include "partials.cuh"

namespace kernelcat {

constexpr int kGroups = 4, kThreads = kGroups * kWarpgroupThreads;
constexpr int kItems = kLatent / 8;  // of 64 rows
constexpr int kInFlight = 8;         // parts that a thread waits for together

struct Sum {
  float4 values = {};
  RowSums rows;

  __device__ __forceinline__ void add(const Sum& other) {
    const Weights weights = kernelcat::add(rows, other.rows);
    kernelcat::add(values, other.values, weights);
  }
};

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kThreads) flashmla_combine(float* memory,      // partials
                                                             const Task* tasks,  // (shares,)
                                                             T* out, float* lse, int num_shares) {
  __shared__ Sum sums[kGroups][kWarpgroupThreads];
  __shared__ Task told[kThreads];
  __shared__ int shares[kThreads], num_tasks;
  grid_dependency_wait();
  launch_dependents();
  const Partials<kRowTiles> partials = {memory};
  if (threadIdx.x < num_shares) told[threadIdx.x] = tasks[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < kWarpThreads) {  // lists the shares that have something to do
    const int lane = lane_index();
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

  const int group = threadIdx.x / kWarpgroupThreads, thread = threadIdx.x % kWarpgroupThreads;
  const int row = thread / kWarpThreads * 16 + lane_index() / 4;
  for (int item = blockIdx.x; item < num_tasks * kRowTiles * kItems; item += gridDim.x) {
    const int share = shares[item / (kRowTiles * kItems)];
    const int rank = item / kItems % kRowTiles;
    const int half = item % kItems / (kItems / 2), step = item % (kItems / 2);
    const Task task = told[share];
    const int num_rows = task.num_rows - rank * kPartRows;
    Sum sum;
    for (int first = group; first < task.num_parts; first += kInFlight * kGroups) {
      Sum parts[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int part = first + i * kGroups;
        if (part < task.num_parts) {
          const int slot = Partials<kRowTiles>::slot(share + part, part == 0, rank);
          parts[i] = {__ldcg(partials.unit(slot, half, step, thread)), partials.sums(slot, row)};
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) sum.add(parts[i]);
    }
    sums[group][thread] = sum;
    __syncthreads();
    if (group == 0) {
#pragma unroll
      for (int i = 1; i < kGroups; ++i) sum.add(sums[i][thread]);
      const int column = half * kHalf + 8 * step + thread % 4 * 2;
      const float values[2][2] = {{sum.values.x, sum.values.y}, {sum.values.z, sum.values.w}};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + 8 * i >= num_rows) continue;
        const int64_t place = static_cast<int64_t>(task.first_row) + rank * kPartRows + row + 8 * i;
        const RowEnd end = RowEnd::of(sum.rows.most[i], sum.rows.total[i]);
        const uint32_t pair = pack<T>(values[i][0] * end.factor, values[i][1] * end.factor);
        *reinterpret_cast<uint32_t*>(out + place * kLatent + column) = pair;
        if (column == 0) lse[place] = end.lse;
      }
    }
    __syncthreads();
  }
}

}  // namespace kernelcat
