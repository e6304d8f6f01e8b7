// What becomes of the sums of a consumer warpgroup of flashmla/wgmma or pair: rows of the result,
// or parts of them that are put together.
#pragma once

#include <kernelcat/fragments.cuh>

#include "latent_tile.cuh"
#include "partials.cuh"

namespace kernelcat {

// Where all consumer threads of a block meet. An mbarrier, and not a named one: it says by itself
// what is ordered by it, to the sanitizer too, wherever in the code a warpgroup comes to it.
struct Meeting {
  Barrier& barrier;
  uint32_t phase = 0;

  __device__ __forceinline__ void operator()() {
    barrier.arrive();
    barrier.wait(phase);
    phase ^= 1;
    __syncwarp();
  }
};

template <typename Tile>
struct LatentResults {
  using T = typename Tile::T;
  static constexpr int kTileRows = Tile::BLOCK_M * Tile::kRowTiles;

  const LatentAttention<T, typename Tile::Cached>& call;
  Partials<kTileRows> partials;
  uint32_t* counters;  // (shares, kSide): zero before and after
  Task* tasks;         // (shares,)
  bool* is_last;       // in shared memory
  int few, share, rank;
};

// Of half `half` of the columns, and 64 rows from row `first` of the segment on: lane l of a warp
// has, of rows l / 4 and l / 4 + 8 of its 16, what wgmma leaves it.
template <typename Tile>
struct LatentResult : LatentResults<Tile> {
  using T = typename Tile::T;
  using Base = LatentResults<Tile>;
  using Base::call, Base::partials, Base::counters, Base::tasks, Base::is_last;
  using Base::few, Base::share, Base::rank, Base::kTileRows;
  static constexpr int kHalf = kLatent / 2;

  int half, first;

  // The upper one of the lane's two rows. Lanes may ask for it one by one (not so warp_index()).
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x) / kWarpThreads % 4 * 16 + lane_index() / 4;
  }

  // Stores the rows, or what this block has of them. Up to `few` parts are put together by the last
  // block that has any, more by a kernel that follows.
  __device__ __forceinline__ void finish(const float (&out)[kHalf / 2], const RowSums<2>& sums,
                                         const Segment& segment, Meeting& meet) const {
    const int num_parts = segment.last_share - segment.first_share + 1;
    if (num_parts == 1) {
      store(out, sums, segment);
      return;
    }
    const bool begins_here = segment.first_share == share;
    put(out, sums, Partials<kTileRows>::slot(share, begins_here));
    if (num_parts > few) {
      if (begins_here && rank == 0 && threadIdx.x == 0) {
        const int first = segment.sequence.first_query * call.heads + segment.side_row;
        tasks[share] = {num_parts, first, segment.side_rows};
      }
      return;
    }
    uint32_t* counter = counters + segment.first_share * Tile::kSide + rank;
    if (is_last_part(counter, num_parts, threadIdx.x == 0, is_last, [&] { meet(); })) {
      merge(segment);
    }
  }

 private:
  // Divides by the softmax's denominators and stores.
  __device__ __forceinline__ void store(const float (&out)[kHalf / 2], const RowSums<2>& sums,
                                        const Segment& segment) const {
    const int lane = lane_index();
    const int64_t begin =
        static_cast<int64_t>(segment.sequence.first_query) * call.heads + segment.first_row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = first + row() + 8 * i;
      const bool is_live = own < segment.num_rows;
      const RowEnd end = RowEnd::of(sums.most[i], sums.total[i]);
      if (half == 0 && is_live && lane % 4 == 0) call.lse[begin + own] = end.lse;
      T* target = call.out + (begin + own) * kLatent + half * kHalf + lane % 4 * 8;
#pragma unroll
      for (int column = 0; column < kHalf; column += 32) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = column / 2 + 4 * j + 2 * i;
          matrices[j] = pack<T>(out[at] * end.factor, out[at + 1] * end.factor);
        }
        const uint4 eight = gather_rows(matrices);
        if (is_live) *reinterpret_cast<uint4*>(target + column) = eight;
      }
    }
  }

  // Of this lane's row `i`: among those of all blocks side by side.
  __device__ __forceinline__ int part_row(int i) const {
    return (Tile::kRowTiles > 1 ? rank * Tile::BLOCK_M : first) + row() + 8 * i;
  }
  // Columns 0 and 1 of every eight, in a slot.
  __device__ __forceinline__ float2* part(int slot, int i) const {
    const int column = half * kHalf + lane_index() % 4 * 2;
    return reinterpret_cast<float2*>(partials.at(slot, part_row(i), column));
  }
  __device__ __forceinline__ float2* part_sums(int slot, int i) const {
    return partials.most_and_total(slot, part_row(i));
  }

  __device__ __forceinline__ void put(const float (&out)[kHalf / 2], const RowSums<2>& sums,
                                      int slot) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2* pairs = part(slot, i);
#pragma unroll
      for (int step = 0; step < kHalf / 8; ++step) {
        const int at = 4 * step + 2 * i;
        __stcg(pairs + 4 * step, {out[at], out[at + 1]});
      }
      // Both halves: the one that merges may know of its own block alone that it is there.
      if (lane_index() % 4 == 0) {
        __stcg(part_sums(slot, i), {sums.most[i], sums.total[i]});
      }
    }
  }

  // Adds all parts up, in the order of shares.
  __device__ __forceinline__ void merge(const Segment& segment) const {
    constexpr int kInFlight = 16;
    float out[kHalf / 2] = {};
    RowSums<2> sums;
#pragma unroll 1
    for (int from = segment.first_share; from <= segment.last_share; ++from) {
      const int slot = Partials<kTileRows>::slot(from, from == segment.first_share);
      RowSums<2> other;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 row_sums = __ldcg(part_sums(slot, i));
        other.most[i] = row_sums.x, other.total[i] = row_sums.y;
      }
      const Factors<2> factors = add(sums, other);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2* pairs = part(slot, i);
#pragma unroll
        for (int first = 0; first < kHalf / 8; first += kInFlight) {
          float2 found[kInFlight];
#pragma unroll
          for (int j = 0; j < kInFlight; ++j) found[j] = __ldcg(pairs + 4 * (first + j));
#pragma unroll
          for (int j = 0; j < kInFlight; ++j) {
            float* pair = out + 4 * (first + j) + 2 * i;
            pair[0] = pair[0] * factors.own[i] + found[j].x * factors.other[i];
            pair[1] = pair[1] * factors.own[i] + found[j].y * factors.other[i];
          }
        }
      }
    }
    store(out, sums, segment);
  }
};

}  // namespace kernelcat
