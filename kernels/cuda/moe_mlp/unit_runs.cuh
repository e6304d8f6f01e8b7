// The weights of one token's experts, divided among warps to the unit. A unit is what a warp
// multiplies at a time (weight_unit.cuh), an item 16 rows of a result, and a run the units of one
// tile row of one expert, of which an item has one or more.
#pragma once

#include "weight_ring.cuh"

namespace kernelcat {

// A unit's place: `slot` numbers the token's experts.
struct UnitPlace {
  int item, slot, row_tile, unit;
};

// The order of all units. With kSums an item is a sum over the token's experts: it has top_k runs.
// Without, each expert has items of its own.
template <bool kSums>
struct UnitRuns {
  int num_row_tiles;  // of an expert
  int num_units;      // of a run
  int top_k;

  __device__ __forceinline__ int num_items() const {
    return kSums ? num_row_tiles : num_row_tiles * top_k;
  }
  __device__ __forceinline__ int item_units() const {
    return kSums ? num_units * top_k : num_units;
  }

  __device__ __forceinline__ UnitPlace at(int index) const {
    const int run = index / num_units, unit = index - run * num_units;
    if constexpr (kSums) {
      const int item = run / top_k;
      return {item, run - item * top_k, item, unit};
    } else {
      const int slot = run / num_row_tiles;
      return {run, slot, run - slot * num_row_tiles, unit};
    }
  }
};

// Units [first, last), of which part `index` of `count` parts is [begin(index), begin(index + 1)).
struct UnitRange {
  int first, last;

  __device__ __forceinline__ int begin(int index, int count) const {
    return first + static_cast<int>(static_cast<int64_t>(last - first) * index / count);
  }
  __device__ __forceinline__ UnitRange part(int index, int count) const {
    return {begin(index, count), begin(index + 1, count)};
  }
  __device__ __forceinline__ bool has_some_of(int begin, int end) const {
    return max(first, begin) < min(last, end);
  }
};

// What a WeightRing asks to go to one place: a segment's pass is a slot. Lane s < top_k has the
// expert of slot s.
struct TokenExperts {
  int lane_expert;

  __device__ __forceinline__ bool contains(const Segment&) const { return true; }
  __device__ __forceinline__ Segment after(const Segment& segment) const { return segment; }
  __device__ __forceinline__ int expert(const Segment& segment) const {
    return __shfl_sync(0xffffffff, lane_expert, segment.pass);
  }
};

// Copies the units of a warp's range, in order.
template <typename Kind, bool kSums>
struct RunRing : WeightRing<Kind, TokenExperts> {
  static_assert(Kind::kRowTiles == 1 && Kind::kTeamWarps == 1);
  using Ring = WeightRing<Kind, TokenExperts>;

  UnitRuns<kSums> runs;
  int next, end;  // units to copy

  // Fills the ring.
  __device__ __forceinline__ void start(const UnitRange& range) {
    next = range.first;
    end = range.last;
    enter_run();
#pragma unroll 1
    for (int i = 0; i < Kind::kDepth; ++i) copy_next();
  }

  __device__ __forceinline__ void enter_run() {
    if (next >= end) return;
    const UnitPlace place = runs.at(next);
    this->segment = {place.slot, place.row_tile, place.row_tile + 1};
    this->group = place.row_tile;
    this->rank = place.unit;  // where enter_group() begins
    this->enter_group();
  }

  // Starts to copy the next unit, if there is any, and moves on.
  __device__ __forceinline__ void copy_next() {
    if (next < end) {
      this->copy_tile(shared_address(this->ring) + this->fill, 0);
      this->fill =
          this->fill + Kind::kSlotBytes == Kind::kWarpBytes ? 0 : this->fill + Kind::kSlotBytes;
      this->codes += Ring::kUnitBytes;
      this->scales += Ring::kScaleStep;
      ++next;
      if (++this->unit == this->num_units) enter_run();
    }
    commit_async_copies();
  }
};

}  // namespace kernelcat
