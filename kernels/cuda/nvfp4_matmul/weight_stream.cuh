// Weights straight from global memory to registers: every lane has its next loads in flight.
#pragma once

#include "decode.cuh"

namespace kernelcat {

// Read once, by nobody else: not kept in L1.
__device__ __forceinline__ uint4 load_stream(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
__device__ __forceinline__ uint2 load_stream(const uint2* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address));
  return v;
}
__device__ __forceinline__ uint32_t load_stream(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

// What a warp reads: of each unit of work kRowTiles tile rows, and of these the tiles of its slice
// of k, in groups of four. The next unit's first group is loaded while the last one's is used.
template <typename T, bool kNvfp4, int kRowTiles>
struct WeightStream {
  using Scales = GroupScales<T, kNvfp4>;
  using Raw = typename Scales::Raw;

  const uint4* codes;          // a lane's words of the first tile
  const Raw* scales;           // a lane's part of the first four tiles'
  int k_tiles, num_row_tiles;  // of W
  int begin, end;              // tiles of the slice
  int row_tile, row_step;      // of what is loaded next; to the next unit
  int tile;                    // the first of the group that is loaded next
  int padded_end;              // where slices of every warp end, in whole groups

  uint4 words[kGroup][kRowTiles];
  Raw raw[kRowTiles];

  __device__ __forceinline__ bool has_rows(int i) const { return row_tile + i < num_row_tiles; }
  __device__ __forceinline__ int64_t first_of(int i) const {
    return static_cast<int64_t>(row_tile + i) * k_tiles + tile;
  }

  __device__ __forceinline__ void load_tile(int t) {
    if (tile + t >= end) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (has_rows(i)) words[t][i] = load_stream(codes + (first_of(i) + t) * kWarpThreads);
    }
  }

  __device__ __forceinline__ void load_scales() {
    const bool is_inside = tile + lane_index() / 8 < end;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (is_inside && has_rows(i)) raw[i] = load_stream(scales + first_of(i) * 8);
    }
  }

  __device__ __forceinline__ void advance() {
    tile += kGroup;
    if (tile < padded_end) return;
    tile = begin;
    row_tile += row_step;
  }
};

}  // namespace kernelcat
