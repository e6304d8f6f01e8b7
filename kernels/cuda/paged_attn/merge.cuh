// What becomes of a tile of rows: the warps' sums are merged in shared memory, those of several
// blocks by the last one to arrive, and rows are stored.
#pragma once

#include <kernelcat/softmax.cuh>

#include "schedule.cuh"
#include "warp_attention.cuh"

namespace kernelcat {

// A sum of values relative to the largest score, and of the exponentials they were weighed by.
struct PartialSum {
  float4 values = {};
  float most = -kInfinity, total = 0.0f;

  __device__ __forceinline__ void add(const PartialSum& other) {
    const float new_most = fmaxf(most, other.most);
    const float own = rescale_factor(most, new_most), others = rescale_factor(other.most, new_most);
    values.x = values.x * own + other.values.x * others;
    values.y = values.y * own + other.values.y * others;
    values.z = values.z * own + other.values.z * others;
    values.w = values.w * own + other.values.w * others;
    total = total * own + other.total * others;
    most = new_most;
  }
};

// Rows of a tile in q and out.
template <typename Kind>
struct TileRows {
  using T = typename Kind::T;
  int64_t first_query;  // of the sequence, among all
  int first_row, kv_head;

  // The same rows of the key-value head `ahead` further on.
  __device__ __forceinline__ TileRows of_head(int ahead) const {
    return {first_query, first_row, kv_head + ahead};
  }

  // Index of (token, head) in q and out.
  __device__ __forceinline__ int64_t at(const Attention<Kind>& call, int row) const {
    const int group = call.group(), query = (first_row + row) / group;
    return (first_query + query) * call.heads + kv_head * group + (first_row + row) % group;
  }

  // Four columns of a row; the first four bring its lse along.
  __device__ __forceinline__ void store(const Attention<Kind>& call, int row, int column,
                                        const PartialSum& sum) const {
    const int64_t place = at(call, row);
    RowEnd end;
    if constexpr (Kind::kSinks) {
      end = RowEnd::with_sink(sum.most, sum.total, __ldg(call.sinks + place % call.heads));
    } else {
      end = RowEnd::of(sum.most, sum.total);
    }
    if (column == 0) call.lse[place] = end.lse;
    if constexpr (Kind::kScales == Scales::kHead) end.factor *= __ldg(call.v_scale + kv_head);
    end.factor *= Kind::kGrowth;
    const uint2 four = {pack<T>(sum.values.x * end.factor, sum.values.y * end.factor),
                        pack<T>(sum.values.z * end.factor, sum.values.w * end.factor)};
    *reinterpret_cast<uint2*>(call.out + place * Kind::kHeadDim + column) = four;
  }
};

// Two slots a block in global memory, since a tile of rows that it shares with others can only be
// its first (slot 0: it goes on from the block before) or its last (slot 1: it begins here). The
// same holds for counters: one a block, of the shared tile that begins in it.
template <typename Kind, int BLOCK_M>
struct Workspace {
  static constexpr int64_t kSlotFloats = BLOCK_M * (Kind::kHeadDim + 2);
  float* partials;
  uint32_t* counters;  // zero before and after

  static __device__ __forceinline__ int slot(int block, bool begins_here) {
    return 2 * block + begins_here;
  }
  __device__ __forceinline__ float* values(int slot, int row, int column) const {
    return partials + slot * kSlotFloats + row * Kind::kHeadDim + column;
  }
  __device__ __forceinline__ float* most_and_total(int slot, int row) const {
    return partials + slot * kSlotFloats + BLOCK_M * Kind::kHeadDim + 2 * row;
  }

  __device__ __forceinline__ void put(int slot, int row, int column, const PartialSum& sum) const {
    __stcg(reinterpret_cast<float4*>(values(slot, row, column)), sum.values);
    if (column == 0) {
      __stcg(reinterpret_cast<float2*>(most_and_total(slot, row)), {sum.most, sum.total});
    }
  }
  __device__ __forceinline__ PartialSum get(int slot, int row, int column) const {
    const float2 row_sums = __ldcg(reinterpret_cast<const float2*>(most_and_total(slot, row)));
    return {__ldcg(reinterpret_cast<const float4*>(values(slot, row, column))), row_sums.x,
            row_sums.y};
  }

  // Whether all `num_parts` of the tile that begins in `block` are there. All threads call it once
  // they have put theirs.
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

  // The parts of blocks first .. last, in this order; eight at a time are in flight.
  __device__ __forceinline__ PartialSum sum(int first, int last, int row, int column) const {
    constexpr int kParts = 8;
    PartialSum sum = get(slot(first, true), row, column);
    for (int block = first + 1; block <= last; block += kParts) {
      PartialSum parts[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (block + i <= last) parts[i] = get(slot(block + i, false), row, column);
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) sum.add(parts[i]);
    }
    return sum;
  }
};

// Warps side by side on tokens have sums of the same rows. They meet in `kBytes` of shared memory,
// as many columns at a time as there is room for.
template <typename Kind, int BLOCK_M, int kNumWarps, int kBytes>
struct BlockSum {
  static constexpr int kWarpsM = BLOCK_M / 16, kWarpsN = kNumWarps / kWarpsM;
  static constexpr int kNeeded = kNumWarps * 16 * Kind::kHeadDim * 4;
  static constexpr int kParts = ceil_div(kNeeded, kBytes);
  static constexpr int kColumns = Kind::kHeadDim / kParts;
  static_assert(Kind::kHeadDim % kParts == 0 && kColumns % 32 == 0);

  float most[kNumWarps][16], total[kNumWarps][16];

  // Calls `take(row, column, sum)` for every four columns of the first `num_rows` rows. A barrier
  // must follow before `buffer` is written again.
  template <typename Warp, typename Take>
  __device__ __forceinline__ void merge(float* buffer, const Warp& own, int num_rows, Take take) {
    merge_part<0>(buffer, own, num_rows, take);
    if constexpr (kParts > 1) merge_part<1>(buffer, own, num_rows, take);
    if constexpr (kParts > 2) merge_part<2>(buffer, own, num_rows, take);
    if constexpr (kParts > 3) merge_part<3>(buffer, own, num_rows, take);
    static_assert(kParts <= 4);
  }

 private:
  template <int kPart, typename Warp, typename Take>
  __device__ __forceinline__ void merge_part(float* buffer, const Warp& own, int num_rows,
                                             Take take) {
    const int warp = threadIdx.x / kWarpThreads, lane = lane_index();
    __syncthreads();  // all are done with what the buffer held
    own.template store<kPart * kColumns, kColumns>(buffer + warp * 16 * kColumns);
    if (kPart == 0 && lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        most[warp][lane / 4 + 8 * i] = own.softmax.most[i];
        total[warp][lane / 4 + 8 * i] = own.softmax.total[i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows * (kColumns / 4); i += kNumWarps * kWarpThreads) {
      const int row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      PartialSum sum;
#pragma unroll
      for (int n = 0; n < kWarpsN; ++n) {
        const int other = n * kWarpsM + row / 16;
        const float* values =
            buffer + (other * 16 + row % 16) * kColumns + place_of_sum(row, column);
        sum.add({*reinterpret_cast<const float4*>(values), most[other][row % 16],
                 total[other][row % 16]});
      }
      take(row, kPart * kColumns + column, sum);
    }
  }
};

}  // namespace kernelcat
