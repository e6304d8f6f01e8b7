// Adds up the sums of a team's warps, which split k, in shared memory.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Floats from one column to the next in a warp's sums of 16 rows: with the padding, the lanes of a
// store write to different banks.
constexpr int kSumsPitch = 20;

template <int kRowTiles, int kColTiles, int kTeamWarps>
struct TeamSum {
  static constexpr int kWarpFloats = kRowTiles * 8 * kSumsPitch;
  static constexpr int kThreads = kTeamWarps * kWarpThreads;

  float* sums;  // (kTeamWarps, kRowTiles, 8, kSumsPitch): of eight columns at a time
  int team, rank;

  __device__ __forceinline__ void sync() const {
    if constexpr (kTeamWarps == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(1 + team, kThreads);
    }
  }

  // Calls function(sum of four rows, first row in the row group, column) for all rows of the first
  // `num_cols` columns. All warps of the team call this.
  template <typename Function>
  __device__ __forceinline__ void add_up(const float (&warp_sums)[kRowTiles][kColTiles][4],
                                         int num_cols, Function function) const {
#pragma unroll
    for (int j = 0; j < kColTiles; ++j) {
      if (j * 8 >= num_cols) break;
      put(warp_sums, j);
      sync();
      for_each_quad(min(num_cols - j * 8, 8),
                    [&](const float4& sum, int row, int col) { function(sum, row, j * 8 + col); });
      sync();
    }
  }

  // Stores a warp's sums of column tile `tile`.
  __device__ __forceinline__ void put(const float (&warp_sums)[kRowTiles][kColTiles][4],
                                      int tile) const {
    const int lane = lane_index();
    float* target = sums + rank * kWarpFloats + lane / 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int col = lane % 4 * 2 + v % 2;
        target[(i * 8 + col) * kSumsPitch + v / 2 * 8] = warp_sums[i][tile][v];
      }
    }
  }

  template <typename Function>
  __device__ __forceinline__ void for_each_quad(int num_cols, Function function) const {
    const int thread = rank * kWarpThreads + lane_index();
#pragma unroll 1
    for (int quad = thread; quad < num_cols * kRowTiles * 4; quad += kThreads) {
      const int part = quad % 4, i = quad / 4 % kRowTiles, col = quad / (4 * kRowTiles);
      const float* first = sums + (i * 8 + col) * kSumsPitch + part * 4;
      float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll 3
      for (int w = 1; w < kTeamWarps; ++w) {
        const float4 other = *reinterpret_cast<const float4*>(first + w * kWarpFloats);
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
      }
      function(sum, i * 16 + part * 4, col);
    }
  }
};

}  // namespace kernelcat
