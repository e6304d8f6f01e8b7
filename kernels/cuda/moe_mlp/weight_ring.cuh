// Weights on their way from global memory: every warp copies what it multiplies into a ring of its
// own, and every lane reads back only what it copied. No barrier is needed for that.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/async_copy_small.cuh>
#include <kernelcat/mbarrier.cuh>

#include "expert_lists.cuh"
#include "weight_unit.cuh"

namespace kernelcat {

// The weights of all experts, (experts, n, k) as stored.
struct WeightSource {
  const uint8_t* w;
  const uint8_t* scale;
  int n, k;
};

// A row group is kRowTiles * 16 rows of an expert. The kTeamWarps warps of a team multiply the same
// row groups and split k: warp `rank` has units rank, rank + kTeamWarps, ... of a group.
template <typename Unit_, int kRowTiles_, int kTeamWarps_, int kDepth_, int kNumWarps_>
struct RingKind {
  using Unit = Unit_;
  static constexpr int kRowTiles = kRowTiles_, kTeamWarps = kTeamWarps_, kDepth = kDepth_;
  static constexpr int kNumWarps = kNumWarps_, kNumTeams = kNumWarps / kTeamWarps;
  static constexpr int kCodeBytes = Unit::kLoads * 512;  // of a warp, for 16 rows
  static constexpr int kTileBytes = kCodeBytes + Unit::kScaleBytes * kWarpThreads;
  static constexpr int kSlotBytes = kRowTiles * kTileBytes;
  static constexpr int kWarpBytes = kDepth * kSlotBytes;
};

template <typename Kind, typename Segments>
struct WeightRing {
  using Unit = typename Kind::Unit;

  WeightSource source;
  Segments segments;
  uint8_t* ring;  // of the warp, in shared memory
  int rank, team, num_units;
  // The next unit to copy.
  Segment segment;
  int group, unit;
  int fill = 0, drain = 0;  // slots that are filled and read next

  // Begins with the warp's first unit and fills the ring.
  __device__ __forceinline__ void start() {
    segment = segments.front();
    group = segment.begin + team;
    unit = rank;
    skip_segments();
#pragma unroll 1
    for (int i = 0; i < Kind::kDepth; ++i) copy_next();
  }

  // Moves to the next segment in which the team has a row group.
  __device__ __forceinline__ void skip_segments() {
    while (group >= segment.end && segments.contains(segment)) {
      segment = segments.after(segment);
      group = segment.begin + team;
    }
  }

  // Starts to copy the next unit, if there is any, and moves on.
  __device__ __forceinline__ void copy_next() {
    if (segments.contains(segment)) {
      const int64_t expert = segments.lists.active[segment.index];
#pragma unroll
      for (int i = 0; i < Kind::kRowTiles; ++i) {
        const uint32_t target =
            shared_address(ring) + fill * Kind::kSlotBytes + i * Kind::kTileBytes;
        copy_tile(target, expert, group * Kind::kRowTiles + i);
      }
      fill = fill + 1 == Kind::kDepth ? 0 : fill + 1;
      unit += Kind::kTeamWarps;
      if (unit >= num_units) {
        unit = rank;
        group += Kind::kNumTeams;
        skip_segments();
      }
    }
    commit_async_copies();
  }

  // Copies a unit of tile row `row_tile` of an expert.
  __device__ __forceinline__ void copy_tile(uint32_t target, int64_t expert, int row_tile) const {
    const int lane = lane_index(), num_row_tiles = source.n / Unit::kRows;
    const bool is_inside = row_tile < num_row_tiles;
    const uint32_t codes = target + lane * 16;
    const uint32_t scales = target + Kind::kCodeBytes + lane * Unit::kScaleBytes;
    if constexpr (Unit::kIsFp4) {
      const int64_t tile = (expert * num_row_tiles + row_tile) * num_units + unit;
      async_copy_16(codes, source.w + tile * 512 + lane * 16, is_inside);
      const uint8_t* scale = source.scale + (tile * 8 + lane / 4) * Unit::kScaleBytes;
      async_copy_small<Unit::kScaleBytes>(scales, scale, is_inside);
    } else {
      const int64_t row_bytes = static_cast<int64_t>(source.k) * (Unit::kIsFp8 ? 1 : 2);
      const uint8_t* first =
          source.w + (expert * source.n + row_tile * Unit::kRows + lane / 4) * row_bytes;
      const int64_t byte = unit * 128 + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < Unit::kLoads; ++i) {
        const int64_t place = byte + i / 2 * 64;
        const bool is_column = is_inside && place < row_bytes;
        const uint8_t* address = first + i % 2 * 8 * row_bytes + place;
        async_copy_16(codes + i * 512, is_column ? address : source.w, is_column);
      }
      if constexpr (Unit::kIsFp8) {
        const int64_t num_blocks = ceil_div(source.n, kScaleBlock);
        const int64_t block = expert * num_blocks + row_tile * Unit::kRows / kScaleBlock;
        const uint8_t* scale = source.scale + (block * num_units + unit) * 4;
        async_copy_small<4>(scales, is_inside ? scale : source.scale, is_inside);
      }
    }
  }

  // Waits for the oldest unit and loads it. copy_next() may follow when `units` have been used.
  __device__ __forceinline__ void load(Unit (&units)[Kind::kRowTiles]) {
    wait_async_copies<Kind::kDepth - 1>();
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Kind::kRowTiles; ++i) {
      const uint8_t* tile = ring + drain * Kind::kSlotBytes + i * Kind::kTileBytes;
#pragma unroll
      for (int l = 0; l < Unit::kLoads; ++l) {
        units[i].codes[l] = reinterpret_cast<const uint4*>(tile + l * 512)[lane];
      }
      const auto* scales = reinterpret_cast<const uint32_t*>(tile + Kind::kCodeBytes);
#pragma unroll
      for (int s = 0; s < Unit::kScaleBytes / 4; ++s) {
        units[i].scales[s] = scales[lane * (Unit::kScaleBytes / 4) + s];
      }
    }
    drain = drain + 1 == Kind::kDepth ? 0 : drain + 1;
  }
};

}  // namespace kernelcat
