// Loads packed weights straight from global memory to registers, ahead of their use.
#pragma once

#include <kernelcat/fp4_operand.cuh>

namespace kernelcat {

// Loads of data that is read only once, which therefore does not go into L1.
__device__ __forceinline__ uint4 load_stream(const uint4* address) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
}
__device__ __forceinline__ uint2 load_stream(const uint2* address) {
  uint2 words;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(address));
  return words;
}
__device__ __forceinline__ uint32_t load_stream(const uint32_t* address) {
  uint32_t word;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(address));
  return word;
}

// The weights that a warp reads: in each work item kRowTiles tile rows, of which it reads the tiles
// of its slice of k, kGroup tiles at a time. While the last group of a work item is multiplied, the
// first group of the next one is loaded.
template <typename T, bool kNvfp4, int kRowTiles>
struct WeightStream {
  using Scales = GroupScales<T, kNvfp4>;
  using Raw = typename Scales::Raw;

  const uint4* codes;          // where the lane's codes of W's first tile are
  const Raw* scales;           // where the lane's scales of W's first group are
  int k_tiles, num_row_tiles;  // tile columns and tile rows of W
  int begin, end;              // tile columns of the slice
  int row_tile;                // the first tile row of the next loads
  int row_step;                // tile rows from a work item to the next
  int tile;                    // the first tile column of the next loads
  int padded_end;              // where the last group of the slice ends

  uint4 words[kGroup][kRowTiles];
  Raw raw[kRowTiles];

  // Whether W has tile row `i` of the next loads, and the number of its first tile there.
  __device__ __forceinline__ bool has_row_tile(int i) const { return row_tile + i < num_row_tiles; }
  __device__ __forceinline__ int64_t tile_index(int i) const {
    return static_cast<int64_t>(row_tile + i) * k_tiles + tile;
  }

  // Starts to load the codes of tile column `t` of the group.
  __device__ __forceinline__ void load_tile(int t) {
    if (tile + t >= end) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (has_row_tile(i)) words[t][i] = load_stream(codes + (tile_index(i) + t) * kWarpThreads);
    }
  }

  // Starts to load the scales of the group.
  __device__ __forceinline__ void load_scales() {
    const bool is_inside = tile + lane_index() / 8 < end;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (is_inside && has_row_tile(i)) raw[i] = load_stream(scales + tile_index(i) * 8);
    }
  }

  // Moves to the next group.
  __device__ __forceinline__ void advance() {
    tile += kGroup;
    if (tile < padded_end) return;
    tile = begin;
    row_tile += row_step;
  }
};

}  // namespace kernelcat
