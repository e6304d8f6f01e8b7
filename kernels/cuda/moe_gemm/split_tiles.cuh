// The tiles of a grouped product of which the last wave is split over k: what is left after whole
// waves has fewer tiles than there are thread blocks, so several of them share a tile.
//
// No thread block waits for another one: whichever arrives last at a tile adds up the sums of all,
// in the order of k, and stores the tile.
#pragma once

#include <kernelcat/stream_k.cuh>

#include "expert_tiles.cuh"

namespace kernelcat {

// K-blocks `first_k` to `end_k` - 1 of a tile, one of `num_parts` parts. The parts of a tile are
// those of every `distance`-th thread block, the first one in one of the first `distance` thread
// blocks.
struct TilePart : ExpertTile {
  int first_k, end_k;
  int num_parts, distance;
};

__device__ __forceinline__ int first_k_block(const TilePart& tile) {
  return tile.first_k;
}
__device__ __forceinline__ int end_k_block(const TilePart& tile, int num_k) {
  return tile.end_k;
}

template <int BLOCK_M, int BLOCK_N>
struct SplitTiles {
  using Item = TilePart;
  static constexpr int kMinKBlocks = 3;  // of a part: it fills and drains a ring of stages
  static constexpr int kMaxParts = 8;    // the last one reads the sums of all others

  ExpertTiles<BLOCK_M, BLOCK_N> whole;
  int num_k;

  __device__ __forceinline__ void load(const int* offsets) const { whole.load(offsets); }
  __device__ __forceinline__ int num_rows() const { return whole.num_rows(); }

  // As ExpertTiles::for_each.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const uint32_t size = whole.first_index(whole.experts), left = size % gridDim.x;
    const uint32_t parts = num_parts(left);  // of each tile that is left after whole waves
    const uint32_t end = size - left + (blockIdx.x < left * parts ? gridDim.x : 0);
    int expert = 0;
    for (uint32_t index = blockIdx.x; index < end; index += gridDim.x) {
      const bool is_split = index >= size - left;
      const uint32_t tile = is_split ? size - left + blockIdx.x % left : index;
      const int part = is_split ? blockIdx.x / left : 0, count = is_split ? parts : 1;
      expert = whole.expert_of(tile, expert);
      function(TilePart{whole.tile_at(expert, tile - whole.first_index(expert)),
                        part * num_k / count, (part + 1) * num_k / count, count,
                        static_cast<int>(left)});
    }
  }

  __device__ __forceinline__ uint32_t num_parts(uint32_t left) const {
    if (left == 0) return 0;
    const uint32_t most = min(max(num_k / kMinKBlocks, 1), kMaxParts);
    return min(gridDim.x / left, most);
  }
};

// Where thread blocks leave their sums of tiles that they share.
struct TileSharing {
  float* partials;     // (thread blocks, BLOCK_M * BLOCK_N)
  uint32_t* counters;  // (thread blocks,), zero before and after

  // Adds up the sums of a tile. Returns false where another thread block has the result. All
  // threads of the consumer warpgroup call this together.
  template <typename Config>
  __device__ __forceinline__ bool add_up(typename Config::Sums& sums, const TilePart& tile,
                                         uint32_t* flag) const {
    if (tile.num_parts == 1) return true;
    constexpr int kSums = Config::BLOCK_M * Config::BLOCK_N, kBarrier = 1;
    const int part = blockIdx.x / tile.distance, first_block = blockIdx.x % tile.distance;
    const SharedTile shared = {.partials = partials + static_cast<int64_t>(first_block) * kSums,
                               .stride = static_cast<int64_t>(tile.distance) * kSums,
                               .counter = counters + first_block,
                               .part = part,
                               .count = tile.num_parts};
    return add_up_sharers(sums, shared, Config::kRowBlocks, Config::BLOCK_M / 2, flag, kBarrier);
  }
};

}  // namespace kernelcat
