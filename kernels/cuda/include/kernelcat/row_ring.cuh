// A ring whose stages hold a slice of the columns of eight rows of weights, and the warp that fills
// it: by one bulk copy for each row (sm_90+), so that any eight rows may form a group.
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
  static __device__ __forceinline__ GroupRange of_block(int num_groups) {
    const auto bound = [&](uint32_t block) {
      return static_cast<int>(static_cast<int64_t>(num_groups) * block / gridDim.x);
    };
    return {bound(blockIdx.x), bound(blockIdx.x + 1)};
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

  // The producer warp: copies the rows of all groups, slice by slice. `row_at(row)` is the address
  // of row `row` < `num_rows`, a multiple of 16 bytes; rows have `k` elements of T, a multiple
  // of 8.
  template <int kRoundGroups, typename RowAt>
  __device__ __forceinline__ void fill(GroupRange groups, int num_rows, int k, RowAt row_at) {
    const uint64_t policy = evict_first_policy();
    const int lane = lane_index();
    PipelineState<kNumStages> position;
    for (int first = groups.begin; first < groups.end; first += kRoundGroups) {
      decltype(row_at(0)) addresses[kRoundGroups];  // of the lane's rows
#pragma unroll 1
      for (int col = 0; col < k; col += kSliceCols) {
        const uint32_t row_bytes = 2 * min(kSliceCols, k - col);
#pragma unroll
        for (int g = 0; g < kRoundGroups; ++g) {
          if (first + g >= groups.end) break;
          const int row = (first + g) * kGroupRows + lane;
          const int count = min(kGroupRows, num_rows - (first + g) * kGroupRows);
          Barrier& barrier = full[position.stage];
          empty[position.stage].wait(position.phase ^ 1);
          if (lane == 0) barrier.arrive_expect(count * row_bytes);
          __syncwarp();
          if (lane < count) {
            if (col == 0) addresses[g] = row_at(row);
            bulk_load(stages[position.stage] + lane * kPitchBytes, addresses[g] + col, row_bytes,
                      barrier, policy);
          }
          __syncwarp();
          position.advance();
        }
      }
    }
  }
};

}  // namespace kernelcat
