// Both products of a layer for one token, one launch each. All warps of the chip have as many
// units of weights to multiply (unit_runs.cuh), and sums meet once, at the end.
//
// A thread block of either product fits on an SM beside one of the other: the second product's
// thread blocks are there while the first multiplies, route the token by themselves and have their
// first weights in shared memory when h is complete. The second product adds up the experts'
// results and the residual, so no launch follows.
#include <kernelcat/cluster_store.cuh>
#include <kernelcat/gating.cuh>
#include <kernelcat/pdl.cuh>

#include "router.cuh"
#include "staged_row.cuh"
#include "unit_runs.cuh"

namespace kernelcat {

constexpr int kNumWarps = 16, kItemRows = 16;

// Adds the products of one unit, from step kStep on, to `products`, or to the sums of the rows
// lane / 4 and lane / 4 + 8 where scales are multiplied in. `operands` are those of the step
// before.
template <typename Unit, int kStep>
__device__ __forceinline__ void multiply_steps(float (&sums)[2], float (&products)[4],
                                               const Unit& unit, uint4& operands,
                                               const uint8_t* b) {
  if constexpr (kStep < Unit::kSteps) {
    if constexpr (kStep % 2 == 0) {
      constexpr int kOffset = kStep / 2 * StagedRow<Unit>::kRowChunkBytes;
      operands = *reinterpret_cast<const uint4*>(b + kOffset);
    }
    uint32_t a[4];
    unit.template operand<kStep>(a);
    const uint2 two =
        kStep % 2 == 0 ? uint2{operands.x, operands.y} : uint2{operands.z, operands.w};
    Unit::multiply(products, a, two);
    if constexpr (Unit::is_last_of_scale(kStep)) {
      const RowScales scales = unit.template row_scales<kStep>();
      sums[0] += products[0] * scales.upper;
      sums[1] += products[2] * scales.lower;
#pragma unroll
      for (int v = 0; v < 4; ++v) products[v] = 0.0f;
    }
    multiply_steps<Unit, kStep + 1>(sums, products, unit, operands, b);
  }
}

// Sums of rows of a thread block's items, in shared memory: (items, kNumWarps, kItemRows) of which
// each warp writes those of the items it has units of.
struct RowSums {
  float* sums;
  int first_item;

  __device__ __forceinline__ float* at(int item, int warp) const {
    return sums + ((item - first_item) * kNumWarps + warp) * kItemRows;
  }
  __device__ __forceinline__ void put(int item, const float (&two)[2]) const {
    float* target = at(item, warp_index()) + lane_index() / 4;
    if (lane_index() % 4 == 0) {
      target[0] = two[0];
      target[8] = two[1];
    }
  }
  // The sum of a row, in the order of warps.
  __device__ __forceinline__ float add_up(int item, int row, const UnitRange& range,
                                          int item_units) const {
    const int begin = item * item_units, end = begin + item_units;
    float sum = 0.0f;
#pragma unroll 4
    for (int warp = 0; warp < kNumWarps; ++warp) {
      if (range.part(warp, kNumWarps).has_some_of(begin, end)) sum += at(item, warp)[row];
    }
    return sum;
  }
};

// `rows_bytes` is the shared memory of staged rows, `block_items` the most items that a thread
// block has units of.
template <typename T, WeightFormat kFormat, Gating kGating, bool kSecond, typename Logit,
          Score kScore, bool kRenormalize, bool kGrouped, int kPerLane, int kVector, int kDepth,
          int kCluster>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, 2)
    moe_mlp_single(const T* a,                 // x (k,), or h (top_k, k)
                   const uint8_t* w,           // (experts, n, k) in kFormat
                   const uint8_t* w_scale,     // (experts, ...), or null
                   const float* global_scale,  // (experts,), or null
                   const T* bias,              // (experts, n), or null
                   const T* residual,          // (n,) for the second product, or null
                   T* result,                  // h (top_k, n / 2), or out (n,)
                   const Logit* logits,        // (experts,)
                   const float* correction,    // (experts,), or null
                   int experts, int top_k, int group_size, int top_groups, float scaling, int n,
                   int k, int rows_bytes, int block_items) {
  using Unit = WeightUnit<T, T, kFormat>;
  using Ring = RingKind<Unit, 1, 1, kDepth, kNumWarps>;
  using Row = StagedRow<Unit>;
  using Routes = RouterKind<Logit, kScore, kRenormalize, kGrouped, kPerLane, kVector>;
  extern __shared__ uint8_t dynamic_shared[];
  const int warp = warp_index(), lane = lane_index();
  const int num_units = ceil_div(k, Unit::kCols);

  // Shared memory: staged rows, rings (before: the router's scores), sums of warps, addends of
  // rows, sums of the cluster's thread blocks.
  constexpr int kUnitChunks = Unit::kCols / Unit::kChunkCols;
  const Row rows = {
      .chunks = dynamic_shared,
      .row_chunks = ceil_div(num_units * kUnitChunks, Row::kLaneChunks) * Row::kLaneChunks,
      .k = k};
  uint8_t* ring_bytes = dynamic_shared + rows_bytes + warp * Ring::kWarpBytes;
  float* warp_sums =
      reinterpret_cast<float*>(dynamic_shared + rows_bytes + kNumWarps * Ring::kWarpBytes);
  float* addends = warp_sums + block_items * kNumWarps * kItemRows;

  // A cluster has whole items; its thread blocks and their warps have equal parts of the units.
  const UnitRuns<kSecond> runs = {ceil_div(n, kItemRows), num_units, top_k};
  const int cluster = blockIdx.x / kCluster, rank = blockIdx.x % kCluster;
  const int num_clusters = gridDim.x / kCluster, item_units = runs.item_units();
  const UnitRange items = UnitRange{0, runs.num_items()}.part(cluster, num_clusters);
  const UnitRange cluster_units = {items.first * item_units, items.last * item_units};
  const UnitRange block_units = cluster_units.part(rank, kCluster);
  const UnitRange range = block_units.part(warp, kNumWarps);
  const int num_rows = (items.last - items.first) * kItemRows;
  float* inbox = addends + ceil_div(runs.num_items(), num_clusters) * kItemRows;

  if constexpr (kCluster > 1) cluster_arrive_relaxed();
  // The launch before the second product is the first product, which began after all launches
  // before it had ended: only h has to be waited for.
  if constexpr (!kSecond) grid_dependency_wait();
  launch_dependents();
  const Router<Routes> router = {logits,     correction, experts, top_k,
                                 group_size, top_groups, scaling};
  const Choice choice = router.select(0, reinterpret_cast<float*>(ring_bytes));

  RunRing<Ring, kSecond> ring;
  ring.source = {.w = w, .scale = w_scale, .n = n, .k = k};
  ring.segments = {choice.expert};
  ring.ring = ring_bytes;
  ring.num_units = num_units;
  ring.runs = runs;
  ring.start(range);

  // What is added to the sum of each row.
  for (int first = warp * kWarpThreads; first < num_rows; first += kNumWarps * kWarpThreads) {
    const int local = first + lane, item = items.first + local / kItemRows;
    float addend = 0.0f;
    if constexpr (kSecond) {
      const int row = item * kItemRows + local % kItemRows;
      const bool is_row = local < num_rows && row < n;
      if (residual != nullptr && is_row) addend = to_float(residual[row]);
      for (int slot = 0; slot < (bias != nullptr ? top_k : 0); ++slot) {
        const int64_t expert = __shfl_sync(0xffffffff, choice.expert, slot);
        const float gate = __shfl_sync(0xffffffff, choice.weight, slot);
        if (is_row) addend += gate * to_float(bias[expert * n + row]);
      }
    } else {
      const int slot = min(item / runs.num_row_tiles, top_k - 1);
      const int row = (item - slot * runs.num_row_tiles) * kItemRows + local % kItemRows;
      const int64_t expert = __shfl_sync(0xffffffff, choice.expert, slot);
      if (bias != nullptr && local < num_rows && row < n) addend = to_float(bias[expert * n + row]);
    }
    if (local < num_rows) addends[local] = addend;
  }

  if constexpr (kSecond) grid_dependency_wait();
  rows.stage(a, kSecond ? top_k : 1);
  __syncthreads();

  const RowSums sums = {warp_sums, item_units > 0 ? block_units.first / item_units : 0};
  float item_sums[2] = {};
  for (int index = range.first; index < range.last;) {
    const UnitPlace place = runs.at(index);
    const int run_end = min(range.last, index + num_units - place.unit);
    float run_sums[2] = {}, products[4] = {};
    const uint8_t* b = rows.operands(kSecond ? place.slot : 0, place.unit);
    for (; index < run_end; ++index, b += Row::kUnitBytes) {
      Unit unit[1];
      uint4 operands;
      ring.load(unit);
      multiply_steps<Unit, 0>(run_sums, products, unit[0], operands, b);
      ring.copy_next();
    }
    float factor = Unit::kGrowth;
    if constexpr (Unit::kNvfp4) {
      factor *= global_scale[__shfl_sync(0xffffffff, choice.expert, place.slot)];
    }
    if constexpr (kSecond) factor *= __shfl_sync(0xffffffff, choice.weight, place.slot);
    item_sums[0] += factor * (Unit::kScaledSteps > 0 ? run_sums[0] : products[0]);
    item_sums[1] += factor * (Unit::kScaledSteps > 0 ? run_sums[1] : products[2]);
    if (index == range.last || index == (place.item + 1) * item_units) {
      sums.put(place.item, item_sums);
      item_sums[0] = item_sums[1] = 0.0f;
    }
  }
  __syncthreads();

  // The thread block `item % kCluster` of a cluster gets the sums of all, and finishes the item.
  const auto owner = [&](int local) { return local / kItemRows % kCluster; };
  const auto has_units = [&](const UnitRange& units, int local) {
    const int begin = cluster_units.first + local / kItemRows * item_units;
    return units.has_some_of(begin, begin + item_units);
  };
  const auto block_sum = [&](int local) {
    return sums.add_up(items.first + local / kItemRows, local % kItemRows, block_units, item_units);
  };
  if constexpr (kCluster > 1) {
    cluster_wait();  // all thread blocks of the cluster have begun
    for (int local = threadIdx.x; local < num_rows; local += kNumWarps * kWarpThreads) {
      if (!has_units(block_units, local)) continue;
      store_word(inbox + local * kCluster + rank, __float_as_uint(block_sum(local)), owner(local));
    }
    cluster_sync();
  }
  for (int first = warp * kWarpThreads; first < num_rows; first += kNumWarps * kWarpThreads) {
    const int local = first + lane;
    const bool is_mine = local < num_rows && owner(local) == rank;
    float z = is_mine ? addends[local] : 0.0f;
    if (kCluster == 1 && is_mine) z += block_sum(local);
    for (int other = 0; other < (kCluster > 1 ? kCluster : 0); ++other) {
      if (is_mine && has_units(cluster_units.part(other, kCluster), local)) {
        z += inbox[local * kCluster + other];
      }
    }
    const float z1 = __shfl_xor_sync(0xffffffff, z, 1);
    const int row = (items.first * kItemRows + local) % (runs.num_row_tiles * kItemRows);
    const bool is_row = is_mine && row < n;
    if constexpr (kSecond) {
      if (is_row && lane % 2 == 0) *reinterpret_cast<uint32_t*>(result + row) = pack<T>(z, z1);
    } else {
      const float h = gated<kGating>(z, z1), h1 = __shfl_xor_sync(0xffffffff, h, 2);
      const int slot = (items.first + local / kItemRows) / runs.num_row_tiles;
      T* target = result + (static_cast<int64_t>(slot) * n + row) / 2;
      if (is_row && lane % 4 == 0) *reinterpret_cast<uint32_t*>(target) = pack<T>(h, h1);
    }
  }
}

}  // namespace kernelcat
