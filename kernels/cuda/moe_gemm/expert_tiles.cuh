// Which tiles of a grouped product a thread block computes. Only the device holds the number of
// rows of each expert, so every thread block finds its tiles from the offsets.
#pragma once

#include <kernelcat/sync.cuh>

#include "tile_pairs.cuh"

namespace kernelcat {

// Rows `row` to `row` + `num_rows` - 1 of an expert, and columns from `col` on. Without rows there
// is nothing to compute. The other thread block of the cluster has the same columns at the same
// time where `shares_weights`.
struct ExpertTile {
  int expert, row, num_rows, col;
  bool shares_weights;
};

// The tiles of all experts: those of expert 0 first. Tiles of an expert are in grouped order, so
// that tiles that are computed at the same time share rows and weights in L2. With kPairs two
// thread blocks beside each other compute a pair of tiles at the same time, and `group_m` is even.
template <int BLOCK_M, int BLOCK_N, bool kPairs = false>
struct ExpertTiles {
  int* offsets;  // (experts + 1,), in shared memory
  int* before;   // (experts + 1,), in shared memory: blocks of BLOCK_M rows before each expert,
                 // with kPairs tiles
  int experts, num_n, group_m;

  // Fills both lists from `global_offsets` (experts + 1,). All threads of the thread block call
  // this; a barrier of the thread block must follow.
  __device__ __forceinline__ void load(const int* global_offsets) const {
    for (int i = threadIdx.x; i <= experts; i += blockDim.x) offsets[i] = global_offsets[i];
    __syncthreads();
    if (threadIdx.x >= kWarpThreads) return;
    int total = 0;
    for (int first = 0; first < experts; first += kWarpThreads) {
      const int lane = lane_index(), expert = first + lane;
      int sum = 0;  // of this lane's expert and the experts of lower lanes
      if (expert < experts) {
        sum = num_row_blocks(expert);
        if constexpr (kPairs) sum = num_paired_tiles(sum, num_n);
      }
#pragma unroll
      for (int distance = 1; distance < kWarpThreads; distance *= 2) {
        const int lower = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += lower;
      }
      if (expert < experts) before[expert + 1] = total + sum;
      total += __shfl_sync(0xffffffff, sum, kWarpThreads - 1);
    }
    if (threadIdx.x == 0) before[0] = 0;
  }

  __device__ __forceinline__ int num_row_blocks(int expert) const {
    return ceil_div(offsets[expert + 1] - offsets[expert], BLOCK_M);
  }

  // The index of an expert's first tile.
  __device__ __forceinline__ uint32_t first_index(int expert) const {
    return static_cast<uint32_t>(before[expert]) * (kPairs ? 1 : num_n);
  }

  // Rows of all experts; further rows have no assignment.
  __device__ __forceinline__ int num_rows() const { return offsets[experts]; }

  // The expert of tile `index`, which is at least `expert`. All lanes of a warp call this together
  // and look at 32 experts at once.
  __device__ __forceinline__ int expert_of(uint32_t index, int expert) const {
    uint32_t ended;
    do {
      const int candidate = min(expert + lane_index(), experts - 1);
      const uint32_t end = first_index(candidate + 1);
      ended = __popc(__ballot_sync(0xffffffff, end <= index));
      expert += ended;
    } while (ended == kWarpThreads);
    return expert;
  }

  // Tile `index` of an expert.
  __device__ __forceinline__ ExpertTile tile_at(int expert, uint32_t index) const {
    PairedTile tile;
    if constexpr (kPairs) {
      tile = paired_tile(index, num_row_blocks(expert), num_n, group_m);
    } else {
      const int num_m = before[expert + 1] - before[expert];
      tile = {grouped_tile(index, num_m, num_n, group_m), false};
    }
    const int row = offsets[expert] + tile.m * BLOCK_M;
    const int num_rows = min(offsets[expert + 1] - row, BLOCK_M);
    return {.expert = expert,
            .row = row,
            .num_rows = kPairs && tile.n == num_n ? 0 : num_rows,
            .col = tile.n * BLOCK_N,
            .shares_weights = tile.shares_weights};
  }

  // Calls `function(tile)` for each tile of this thread block. All lanes of a warp call this
  // together.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const uint32_t size = first_index(experts);
    int expert = 0;
    for (uint32_t index = blockIdx.x; index < size; index += gridDim.x) {
      expert = expert_of(index, expert);
      function(tile_at(expert, index - first_index(expert)));
    }
  }
};

}  // namespace kernelcat
