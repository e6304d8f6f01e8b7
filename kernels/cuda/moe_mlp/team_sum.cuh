// Adds up the sums of a team's warps, which split k, in shared memory.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Floats from one column to the next in a warp's sums of 16 rows: with the padding, the lanes of a
// store write to different banks.
constexpr int kSumsPitch = 20;

template <int kRowTiles, int kColTiles, int kTeamWarps>
struct TeamSum {
  static constexpr int kCols = kColTiles * 8;
  static constexpr int kWarpFloats = kRowTiles * kCols * kSumsPitch;
  static constexpr int kThreads = kTeamWarps * kWarpThreads;

  float* sums;  // (kTeamWarps, kRowTiles, kCols, kSumsPitch)
  int team, rank;

  __device__ __forceinline__ void sync() const {
    if constexpr (kTeamWarps == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + team, kThreads);
    }
  }

  // Stores a warp's sums; function(sum of four rows, first row in the row group, column) is then
  // called for all rows of the first `num_cols` columns. All warps of the team call this.
  template <typename Function>
  __device__ __forceinline__ void add_up(const float (&warp_sums)[kRowTiles][kColTiles][4],
                                         int num_cols, Function function) const {
    const int lane = lane_index();
    float* target = sums + rank * kWarpFloats + lane / 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColTiles; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int col = j * 8 + lane % 4 * 2 + v % 2;
          target[(i * kCols + col) * kSumsPitch + v / 2 * 8] = warp_sums[i][j][v];
        }
      }
    }
    sync();
    const int thread = rank * kWarpThreads + lane;
#pragma unroll 1
    for (int quad = thread; quad < num_cols * kRowTiles * 4; quad += kThreads) {
      const int part = quad % 4, i = quad / 4 % kRowTiles, col = quad / (4 * kRowTiles);
      const float* first = sums + (i * kCols + col) * kSumsPitch + part * 4;
      float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll 3
      for (int w = 1; w < kTeamWarps; ++w) {
        const float4 other = *reinterpret_cast<const float4*>(first + w * kWarpFloats);
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
      }
      function(sum, i * 16 + part * 4, col);
    }
    sync();
  }
};

}  // namespace kernelcat
