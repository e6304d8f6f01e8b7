// What becomes of a row tile's accumulators: those of the warps are merged in shared memory, those
// of several thread blocks by the last one to finish, and the rows are stored.
#pragma once

#include "tile_rows.cuh"
#include "warp_attention.cuh"
#include "work_list.cuh"

namespace kernelcat {

// Partial results in global memory. A thread block has two slots, because only its first and its
// last row tile can be shared with other thread blocks: slot 0 is for a row tile that another
// thread block begins, slot 1 for the one that this thread block begins. For the same reason each
// thread block has one counter, for the shared row tile that begins in it.
template <typename Kind, int BLOCK_M>
struct PartialResults {
  // BLOCK_M rows of accumulators, then (row_max, row_sum) of each.
  static constexpr int64_t kSlotFloats = BLOCK_M * (Kind::kHeadDim + 2);
  float* slots;        // (2 * gridDim.x, kSlotFloats)
  uint32_t* counters;  // (gridDim.x,), zero before and after

  static __device__ __forceinline__ int slot(int block, bool begins_here) {
    return 2 * block + begins_here;
  }

  __device__ __forceinline__ void store(int slot, int row, int column,
                                        const PartialSum& sum) const {
    __stcg(reinterpret_cast<float4*>(values(slot, row, column)), sum.values);
    if (column == 0) {
      __stcg(reinterpret_cast<float2*>(row_stats(slot, row)), {sum.row_max, sum.row_sum});
    }
  }

  // Whether this thread block is the last of `num_parts` to store its part of the row tile that
  // begins in thread block `block`. All threads call it after they have stored.
  __device__ __forceinline__ bool is_last(int block, int num_parts, bool* shared) const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *shared = atomicAdd(counters + block, 1) + 1 == num_parts;
      if (*shared) counters[block] = 0;
      __threadfence();
    }
    __syncthreads();
    return *shared;
  }

  // Adds up the parts of thread blocks first .. last in this order, eight loads in flight.
  __device__ __forceinline__ PartialSum sum(int first, int last, int row, int column) const {
    constexpr int kInFlight = 8;
    PartialSum sum = load(slot(first, true), row, column);
    for (int block = first + 1; block <= last; block += kInFlight) {
      PartialSum parts[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (block + i <= last) parts[i] = load(slot(block + i, false), row, column);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) sum.add(parts[i]);
    }
    return sum;
  }

 private:
  __device__ __forceinline__ float* values(int slot, int row, int column) const {
    return slots + slot * kSlotFloats + row * Kind::kHeadDim + column;
  }
  __device__ __forceinline__ float* row_stats(int slot, int row) const {
    return slots + slot * kSlotFloats + BLOCK_M * Kind::kHeadDim + 2 * row;
  }
  __device__ __forceinline__ PartialSum load(int slot, int row, int column) const {
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(row_stats(slot, row)));
    return {.values = __ldcg(reinterpret_cast<const float4*>(values(slot, row, column))),
            .row_max = stats.x,
            .row_sum = stats.y};
  }
};

// Merges the accumulators of warps that have the same rows and different tokens, through kBytes of
// shared memory: as many columns at a time as fit.
template <typename Kind, int BLOCK_M, int kNumWarps, int kBytes>
struct WarpMerge {
  static constexpr int kWarpsM = BLOCK_M / 16, kWarpsN = kNumWarps / kWarpsM;
  static constexpr int kNeededBytes = kNumWarps * 16 * Kind::kHeadDim * 4;
  static constexpr int kPasses = ceil_div(kNeededBytes, kBytes);
  static constexpr int kColumns = Kind::kHeadDim / kPasses;
  static_assert(Kind::kHeadDim % kPasses == 0 && kColumns % 32 == 0);

  float row_max[kNumWarps][16], row_sum[kNumWarps][16];

  // Calls `consume(row, column, sum)` for every four columns of the first `num_rows` rows. `buffer`
  // has kBytes; a __syncthreads() must follow before it is written again.
  template <typename Warp, typename Consume>
  __device__ __forceinline__ void merge(float* buffer, const Warp& warp, int num_rows,
                                        Consume consume) {
    merge_pass<0>(buffer, warp, num_rows, consume);
    if constexpr (kPasses > 1) merge_pass<1>(buffer, warp, num_rows, consume);
    if constexpr (kPasses > 2) merge_pass<2>(buffer, warp, num_rows, consume);
    if constexpr (kPasses > 3) merge_pass<3>(buffer, warp, num_rows, consume);
    static_assert(kPasses <= 4);
  }

 private:
  template <int kPass, typename Warp, typename Consume>
  __device__ __forceinline__ void merge_pass(float* buffer, const Warp& warp, int num_rows,
                                             Consume consume) {
    const int warp_idx = threadIdx.x / kWarpThreads, lane = lane_index();
    __syncthreads();  // all warps have read what the buffer held
    warp.template store<kPass * kColumns, kColumns>(buffer + warp_idx * 16 * kColumns);
    if (kPass == 0 && lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_max[warp_idx][lane / 4 + 8 * i] = warp.softmax.row_max[i];
        row_sum[warp_idx][lane / 4 + 8 * i] = warp.softmax.row_sum[i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows * (kColumns / 4); i += kNumWarps * kWarpThreads) {
      const int row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      PartialSum sum;
#pragma unroll
      for (int n = 0; n < kWarpsN; ++n) {
        const int w = n * kWarpsM + row / 16;
        const float* values =
            buffer + (w * 16 + row % 16) * kColumns + swizzled_column(row, column);
        sum.add({.values = *reinterpret_cast<const float4*>(values),
                 .row_max = row_max[w][row % 16],
                 .row_sum = row_sum[w][row % 16]});
      }
      consume(row, kPass * kColumns + column, sum);
    }
  }
};

}  // namespace kernelcat
