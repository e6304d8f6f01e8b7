// Which tiles of a grouped product a thread block computes. Only the device holds the number of
// rows of each expert, so every thread block finds its tiles from the offsets.
#pragma once

#include <kernelcat/sync.cuh>
#include <kernelcat/tile_order.cuh>

namespace kernelcat {

// Rows `row` to `row` + `num_rows` - 1 of an expert, and columns from `col` on.
struct ExpertTile {
  int expert, row, num_rows, col;
};

// The tiles of all experts: those of expert 0 first. Tiles of an expert are in grouped order, so
// that tiles that are computed at the same time share rows and weights in L2.
template <int BLOCK_M, int BLOCK_N>
struct ExpertTiles {
  int* offsets;     // (experts + 1,), in shared memory
  int* row_blocks;  // (experts + 1,), in shared memory: blocks of BLOCK_M rows before each expert
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
      if (expert < experts) sum = ceil_div(offsets[expert + 1] - offsets[expert], BLOCK_M);
#pragma unroll
      for (int distance = 1; distance < kWarpThreads; distance *= 2) {
        const int lower = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += lower;
      }
      if (expert < experts) row_blocks[expert + 1] = total + sum;
      total += __shfl_sync(0xffffffff, sum, kWarpThreads - 1);
    }
    if (threadIdx.x == 0) row_blocks[0] = 0;
  }

  // Rows of all experts; further rows have no assignment.
  __device__ __forceinline__ int num_rows() const { return offsets[experts]; }

  // The expert of tile `index`, which is at least `expert`. All lanes of a warp call this together
  // and look at 32 experts at once.
  __device__ __forceinline__ int expert_of(uint32_t index, int expert) const {
    uint32_t ended;
    do {
      const int candidate = min(expert + lane_index(), experts - 1);
      const uint32_t end = static_cast<uint32_t>(row_blocks[candidate + 1]) * num_n;
      ended = __popc(__ballot_sync(0xffffffff, end <= index));
      expert += ended;
    } while (ended == kWarpThreads);
    return expert;
  }

  // Calls `function(tile)` for each tile of this thread block. All lanes of a warp call this
  // together.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const uint32_t size = static_cast<uint32_t>(row_blocks[experts]) * num_n;
    int expert = 0;
    for (uint32_t index = blockIdx.x; index < size; index += gridDim.x) {
      expert = expert_of(index, expert);
      const int first_block = row_blocks[expert];
      const uint32_t in_expert = index - static_cast<uint32_t>(first_block) * num_n;
      const Tile tile =
          grouped_tile(in_expert, row_blocks[expert + 1] - first_block, num_n, group_m);
      const int row = offsets[expert] + tile.m * BLOCK_M;
      function(ExpertTile{.expert = expert,
                          .row = row,
                          .num_rows = min(offsets[expert + 1] - row, BLOCK_M),
                          .col = tile.n * BLOCK_N});
    }
  }
};

}  // namespace kernelcat
