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
  static constexpr int kUnitBytes = Unit::kIsFp4 ? 512 : 128;  // from one unit to the next
  static constexpr int kScaleStep = Unit::kIsFp4 ? 8 * Unit::kScaleBytes : 4;

  WeightSource source;
  Segments segments;
  uint8_t* ring;  // of the warp, in shared memory
  int rank, team, num_units;

  // The next unit to copy.
  Segment segment;
  int group, unit;                // unit == num_units: there is none
  const uint8_t *codes, *scales;  // what the lane copies of the group's first 16 rows

  uint32_t fill = 0, drain = 0;  // bytes from the ring's begin to the slots to fill and to read

  // Begins with the warp's first unit and fills the ring.
  __device__ __forceinline__ void start() {
    segment = segments.front();
    group = segment.begin + team;
    enter_group();
#pragma unroll 1
    for (int i = 0; i < Kind::kDepth; ++i) copy_next();
  }

  // Bytes of a row of 8-bit or 16-bit weights.
  __device__ __forceinline__ int64_t row_bytes() const {
    return static_cast<int64_t>(source.k) * (Unit::kIsFp8 ? 1 : 2);
  }

  // Bytes from 16 rows to the next 16 rows.
  __device__ __forceinline__ int64_t tile_row_bytes() const {
    return Unit::kIsFp4 ? static_cast<int64_t>(num_units) * 512 : row_bytes() * Unit::kRows;
  }

  // Goes to the warp's first unit of `group`, or of a later segment in which the team has a group.
  __device__ __forceinline__ void enter_group() {
    while (group >= segment.end && segments.contains(segment)) {
      segment = segments.after(segment);
      group = segment.begin + team;
    }
    unit = segments.contains(segment) ? rank : num_units;
    if (unit == num_units) return;
    const int lane = lane_index();
    const int64_t expert = segments.expert(segment);
    const int row_tile = group * Kind::kRowTiles, num_row_tiles = source.n / Unit::kRows;
    const int64_t tile_row = expert * num_row_tiles + row_tile;
    if constexpr (Unit::kIsFp4) {
      const int64_t tile = tile_row * num_units + unit;
      codes = source.w + tile * 512 + lane * 16;
      scales = source.scale + (tile * 8 + lane / 4) * Unit::kScaleBytes;
    } else {
      codes = source.w + tile_row * tile_row_bytes() + lane / 4 * row_bytes() + unit * kUnitBytes +
              lane % 4 * 16;
    }
    if constexpr (Unit::kIsFp8) {
      const int64_t num_blocks = ceil_div(source.n, kScaleBlock);
      const int64_t block = expert * num_blocks + row_tile * Unit::kRows / kScaleBlock;
      scales = source.scale + (block * num_units + unit) * 4;
    }
  }

  // Starts to copy the next unit, if there is any, and moves on.
  __device__ __forceinline__ void copy_next() {
    if (unit < num_units) {
      const uint32_t slot = shared_address(ring) + fill;
#pragma unroll
      for (int i = 0; i < Kind::kRowTiles; ++i) copy_tile(slot + i * Kind::kTileBytes, i);
      fill = fill + Kind::kSlotBytes == Kind::kWarpBytes ? 0 : fill + Kind::kSlotBytes;
      codes += Kind::kTeamWarps * kUnitBytes;
      scales += Kind::kTeamWarps * kScaleStep;
      unit += Kind::kTeamWarps;
      if (unit >= num_units) {
        group += Kind::kNumTeams;
        enter_group();
      }
    }
    commit_async_copies();
  }

  // Copies the unit's rows from 16 * i on.
  __device__ __forceinline__ void copy_tile(uint32_t target, int i) const {
    const int lane = lane_index();
    const bool is_inside =
        Kind::kRowTiles == 1 || (group * Kind::kRowTiles + i) * Unit::kRows < source.n;
    const uint8_t* first = codes + i * tile_row_bytes();
    const uint32_t lane_target = target + lane * 16;
    if constexpr (Unit::kIsFp4) {
      async_copy_16(lane_target, first, is_inside);
    } else {
      const int64_t place = static_cast<int64_t>(unit) * kUnitBytes + lane % 4 * 16;
#pragma unroll
      for (int l = 0; l < Unit::kLoads; ++l) {
        const int64_t offset = l % 2 * 8 * row_bytes() + l / 2 * 64;
        const bool is_column = is_inside && place + l / 2 * 64 < row_bytes();
        async_copy_16(lane_target + l * 512, is_column ? first + offset : source.w, is_column);
      }
    }
    if constexpr (!Unit::kIsSixteenBits) {
      const int64_t step = Unit::kIsFp4 ? static_cast<int64_t>(num_units) * kScaleStep : 0;
      async_copy_small<Unit::kScaleBytes>(target + Kind::kCodeBytes + lane * Unit::kScaleBytes,
                                          is_inside ? scales + i * step : source.scale, is_inside);
    }
  }

  // Waits for the oldest unit and loads it. copy_next() may follow when `units` have been used.
  __device__ __forceinline__ void load(Unit (&units)[Kind::kRowTiles]) {
    wait_async_copies<Kind::kDepth - 1>();
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < Kind::kRowTiles; ++i) {
      const uint8_t* tile = ring + drain + i * Kind::kTileBytes;
#pragma unroll
      for (int l = 0; l < Unit::kLoads; ++l) {
        units[i].codes[l] = reinterpret_cast<const uint4*>(tile + l * 512)[lane];
      }
      const auto* words = reinterpret_cast<const uint32_t*>(tile + Kind::kCodeBytes);
#pragma unroll
      for (int s = 0; s < Unit::kScaleBytes / 4; ++s) {
        units[i].scales[s] = words[lane * (Unit::kScaleBytes / 4) + s];
      }
    }
    drain = drain + Kind::kSlotBytes == Kind::kWarpBytes ? 0 : drain + Kind::kSlotBytes;
  }
};

}  // namespace kernelcat
