// A ring whose stages hold a slice of the columns of eight rows of weights, and the thread that
// fills it: by one bulk copy for each row (sm_90+), so that rows of a group need not be adjacent.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/stage_release.cuh>

namespace kernelcat {

constexpr int kGroupRows = 8;   // rows of a group: the columns of mma.sync's right operand
constexpr int kChunkCols = 32;  // columns that a warp multiplies at a time: 16 bytes a lane
constexpr int kChunkBytes = 2 * kChunkCols;

// The row groups of a thread block, which it computes kRoundGroups at a time. For each round,
// stages go over the slices of the columns, and in each slice over the round's groups.
struct GroupRange {
  int begin, end;

  // The thread block's part of `num_groups` groups.
  static __device__ __forceinline__ GroupRange of_block(uint32_t num_groups) {
    const uint32_t share = num_groups / gridDim.x, rest = num_groups % gridDim.x;
    const uint32_t begin = blockIdx.x * share + min(blockIdx.x, rest);
    return {static_cast<int>(begin), static_cast<int>(begin + share + (blockIdx.x < rest))};
  }
};

// Where the rows of a group are: rows 0, 2, 4, 6 begin `step` elements after each other, and so do
// rows 1, 3, 5, 7.
template <typename T>
struct RowGroup {
  const T *even, *odd;
  int64_t step;

  __device__ __forceinline__ const T* operator[](int row) const {
    return (row % 2 == 0 ? even : odd) + row / 2 * step;
  }
};

// A slice has kChunks chunks for each of kNumWarps consumer warps.
template <int kNumWarps_, int kChunks_, int kNumStages_>
struct RowRing {
  static constexpr int kNumWarps = kNumWarps_, kChunks = kChunks_, kNumStages = kNumStages_;
  static constexpr int kSliceCols = kNumWarps * kChunks * kChunkCols;
  // Eight lanes read 64 bytes of each of two rows at a time: from all banks once, because the
  // second row begins 64 bytes after a multiple of 128 bytes.
  static constexpr int kPitchBytes = 2 * kSliceCols + 64;
  static_assert(2 * kSliceCols % 128 == 0);

  alignas(128) uint8_t stages[kNumStages][kGroupRows * kPitchBytes];
  Barrier full[kNumStages], empty[kNumStages];

  // Runs in one thread; a barrier of the thread block must follow.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kNumStages; ++i) {
      full[i].init(1);
      empty[i].init(kNumWarps);
    }
    fence_barrier_init();
  }

  // The producer; runs in one thread. Copies the rows of all groups, slice by slice.
  // `group_at(row)` is the RowGroup that begins with row `row` < `num_rows`. Its addresses are
  // multiples of 16 bytes; rows have `k` elements, a multiple of 8.
  template <int kRoundGroups, typename T, typename GroupAt>
  __device__ __forceinline__ void fill(GroupRange groups, int num_rows, int k, GroupAt group_at) {
    const uint64_t policy = evict_first_policy();
    PipelineState<kNumStages> position;
    for (int first = groups.begin; first < groups.end; first += kRoundGroups) {
      RowGroup<T> row_groups[kRoundGroups];
#pragma unroll 1
      for (int col = 0; col < k; col += kSliceCols) {
        const uint32_t row_bytes = 2 * min(kSliceCols, k - col);
#pragma unroll
        for (int g = 0; g < kRoundGroups; ++g) {
          if (first + g >= groups.end) break;
          int row = (first + g) * kGroupRows;
          if (col == 0) {
            asm volatile("" : "+r"(row));  // else all addresses come before the first copy
            row_groups[g] = group_at(row);
          }
          const int count = min(kGroupRows, num_rows - (first + g) * kGroupRows);
          uint8_t* stage = stages[position.stage];
          Barrier& barrier = full[position.stage];
          empty[position.stage].wait(position.phase ^ 1);
          barrier.arrive_expect(count * row_bytes);
#pragma unroll
          for (int i = 0; i < kGroupRows; ++i) {
            if (i >= count) break;
            bulk_load(stage + i * kPitchBytes, row_groups[g][i] + col, row_bytes, barrier, policy);
          }
          position.advance();
        }
      }
    }
  }
};

}  // namespace kernelcat
