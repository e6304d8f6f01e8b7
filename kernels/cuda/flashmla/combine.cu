// Puts together rows that blocks have parts of, 128 columns of a row at a time: few parts by a
// warp, many by a block, a warp for every 16th part.
#include <kernelcat/pdl.cuh>

#include "partials.cuh"

namespace kernelcat {

constexpr int kNumWarps = 16, kThreads = kNumWarps * kWarpThreads;
constexpr int kColumns = 4 * kWarpThreads, kItems = kLatent / kColumns;  // of a row
constexpr int kInFlight = 4;  // parts that a thread waits for together
constexpr int kFewParts = 2 * kInFlight;

// Of four columns of a row, relative to its largest score in base 2.
struct Sum {
  float4 values = {};
  float most = -kInfinity, total = 0.0f;

  __device__ __forceinline__ void add(float4 other, float2 most_and_total) {
    const float new_most = fmaxf(most, most_and_total.x);
    const float kept = rescale_factor(most, new_most),
                factor = rescale_factor(most_and_total.x, new_most);
    values.x = values.x * kept + other.x * factor;
    values.y = values.y * kept + other.y * factor;
    values.z = values.z * kept + other.z * factor;
    values.w = values.w * kept + other.w * factor;
    total = total * kept + most_and_total.y * factor;
    most = new_most;
  }
};

// Tasks of few parts come first, then those of many.
struct Tasks {
  Task told[kThreads];
  int shares[kThreads];  // few at the front, many from the back
  int num_few, num_many;

  // Runs in one warp.
  __device__ __forceinline__ void list(int num_shares) {
    const int lane = lane_index();
    const uint32_t before = (1u << lane) - 1;
    int few = 0, many = 0;
    for (int first = 0; first < num_shares; first += kWarpThreads) {
      const int share = first + lane, parts = share < num_shares ? told[share].num_parts : 0;
      const uint32_t is_few = __ballot_sync(0xffffffff, parts > 0 && parts <= kFewParts);
      const uint32_t is_many = __ballot_sync(0xffffffff, parts > kFewParts);
      if (is_few >> lane & 1) shares[few + __popc(is_few & before)] = share;
      if (is_many >> lane & 1) shares[kThreads - 1 - many - __popc(is_many & before)] = share;
      few += __popc(is_few), many += __popc(is_many);
    }
    if (lane == 0) num_few = few, num_many = many;
  }
};

// Four columns of a row of a task.
template <typename T, int kTileRows>
struct RowItem {
  static constexpr int kPerTask = kTileRows * kItems;
  Task task;
  int share, row, column;

  __device__ __forceinline__ RowItem(const Tasks& tasks, int share, int item)
      : task(tasks.told[share]),
        share(share),
        row(item / kItems % kTileRows),
        column(item % kItems * kColumns + 4 * lane_index()) {}

  // Of every `step`th part from part `first` on.
  __device__ __forceinline__ Sum sum(Partials<kTileRows> partials, int first, int step) const {
    Sum sum;
    for (; first < task.num_parts; first += kInFlight * step) {
      float4 found[kInFlight];
      float2 rows[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int part = first + i * step;
        found[i] = {}, rows[i] = {-kInfinity, 0.0f};
        const int slot = Partials<kTileRows>::slot(share + part, part == 0);
        const auto* four = reinterpret_cast<const float4*>(partials.at(slot, row, column));
        if (part < task.num_parts) found[i] = __ldcg(four);
        if (part < task.num_parts) rows[i] = __ldcg(partials.most_and_total(slot, row));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) sum.add(found[i], rows[i]);
    }
    return sum;
  }

  __device__ __forceinline__ void store(const Sum& sum, T* out, float* lse) const {
    const int64_t place = static_cast<int64_t>(task.first_row) + row;
    const RowEnd end = RowEnd::of(sum.most, sum.total);
    const uint2 four = {pack<T>(sum.values.x * end.factor, sum.values.y * end.factor),
                        pack<T>(sum.values.z * end.factor, sum.values.w * end.factor)};
    *reinterpret_cast<uint2*>(out + place * kLatent + column) = four;
    if (column == 0) lse[place] = end.lse;
  }
};

template <typename T, int kTileRows>
__global__ void __launch_bounds__(kThreads) flashmla_combine(float* memory,      // partials
                                                             const Task* given,  // (shares,)
                                                             T* out, float* lse, int num_shares) {
  using Item = RowItem<T, kTileRows>;
  __shared__ float4 values[kNumWarps][kWarpThreads];
  __shared__ float2 most_and_total[kNumWarps];
  __shared__ Tasks tasks;
  grid_dependency_wait();
  launch_dependents();
  const Partials<kTileRows> partials = {memory};
  const int warp = warp_index(), lane = lane_index();
  if (threadIdx.x < num_shares) tasks.told[threadIdx.x] = given[threadIdx.x];
  __syncthreads();
  if (warp == 0) tasks.list(num_shares);
  __syncthreads();

  const int num_few = tasks.num_few * Item::kPerTask, num_many = tasks.num_many * Item::kPerTask;
  for (int i = warp * gridDim.x + blockIdx.x; i < num_few; i += kNumWarps * gridDim.x) {
    const Item item(tasks, tasks.shares[i / Item::kPerTask], i);
    if (item.row < item.task.num_rows) item.store(item.sum(partials, 0, 1), out, lse);
  }
  for (int i = blockIdx.x; i < num_many; i += gridDim.x) {
    const Item item(tasks, tasks.shares[kThreads - 1 - i / Item::kPerTask], i);
    if (item.row >= item.task.num_rows) continue;
    Sum sum = item.sum(partials, warp, kNumWarps);
    values[warp][lane] = sum.values;
    if (lane == 0) most_and_total[warp] = {sum.most, sum.total};
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int j = 1; j < kNumWarps; ++j) sum.add(values[j][lane], most_and_total[j]);
      item.store(sum, out, lse);
    }
    __syncthreads();
  }
}

}  // namespace kernelcat
