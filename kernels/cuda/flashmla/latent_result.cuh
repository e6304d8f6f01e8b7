// What becomes of the accumulators of a consumer warpgroup of flashmla/wgmma or pair: rows of the
// output, or partial results that are merged.
#pragma once

#include <kernelcat/fragments.cuh>

#include "latent_tile.cuh"
#include "partial_results.cuh"

namespace kernelcat {

// Synchronizes all consumer threads of a thread block. An mbarrier, unlike a named barrier, shows
// the sanitizer what it orders, wherever in the code a warpgroup reaches it.
struct ConsumerSync {
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

  const LatentArgs<T, typename Tile::Cached>& args;
  PartialResults<kTileRows> partials;
  uint32_t* counters;                // (teams, kTeamBlocks), zero before and after
  CombineTask* tasks;                // (teams,)
  bool* is_last;                     // in shared memory
  int max_inline_parts, team, rank;  // rank: of the thread block in its team
};

// The result of 64 rows, from row `first` of the segment on, in half `half` of the columns. Lane l
// of a warp has rows l / 4 and l / 4 + 8 of its 16, in the layout of wgmma's accumulators.
template <typename Tile>
struct LatentResult : LatentResults<Tile> {
  using T = typename Tile::T;
  using Base = LatentResults<Tile>;
  using Base::args, Base::partials, Base::counters, Base::tasks, Base::is_last;
  using Base::max_inline_parts, Base::team, Base::rank, Base::kTileRows;
  static constexpr int kColumns = kLatent / 2;

  int half, first;

  // The upper one of the lane's two rows. Unlike warp_index(), single lanes may call it.
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x) / kWarpThreads % 4 * 16 + lane_index() / 4;
  }

  // Stores the rows, or this thread block's part of them. The last thread block that stores a part
  // adds up all parts if there are up to max_inline_parts; otherwise flashmla_combine does.
  __device__ __forceinline__ void finish(const float (&accumulators)[kColumns / 2],
                                         const RowStats<2>& stats, const Segment& segment,
                                         ConsumerSync& sync_consumers) const {
    const int num_parts = segment.last_team - segment.first_team + 1;
    if (num_parts == 1) {
      store(accumulators, stats, segment);
      return;
    }
    const bool begins_here = segment.first_team == team;
    store_part(accumulators, stats, segment, PartialResults<kTileRows>::slot(team, begins_here));
    if (num_parts > max_inline_parts) {
      if (begins_here && rank == 0 && threadIdx.x == 0) {
        const int first = segment.sequence.first_query * args.heads + segment.team_row;
        tasks[team] = {num_parts, first, segment.num_team_rows};
      }
      return;
    }
    uint32_t* counter = counters + segment.first_team * Tile::kTeamBlocks + rank;
    if (is_last_part(counter, num_parts, threadIdx.x == 0, is_last, [&] { sync_consumers(); })) {
      merge(segment);
    }
  }

 private:
  // Divides by the softmax's denominators and stores.
  __device__ __forceinline__ void store(const float (&accumulators)[kColumns / 2],
                                        const RowStats<2>& stats, const Segment& segment) const {
    const int lane = lane_index();
    const int64_t begin =
        static_cast<int64_t>(segment.sequence.first_query) * args.heads + segment.first_row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row_idx = first + row() + 8 * i;
      const bool is_inside = row_idx < segment.num_rows;
      const RowEnd end = RowEnd::of(stats.row_max[i], stats.row_sum[i]);
      if (half == 0 && is_inside && lane % 4 == 0) args.lse[begin + row_idx] = end.lse;
      T* target = args.out + (begin + row_idx) * kLatent + half * kColumns + lane % 4 * 8;
#pragma unroll
      for (int column = 0; column < kColumns; column += 32) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = column / 2 + 4 * j + 2 * i;
          matrices[j] = pack<T>(accumulators[at] * end.factor, accumulators[at + 1] * end.factor);
        }
        const uint4 eight = gather_rows(matrices);
        if (is_inside) *reinterpret_cast<uint4*>(target + column) = eight;
      }
    }
  }

  // Index of the lane's row `i` among the rows of the team.
  __device__ __forceinline__ int part_row(int i) const {
    return (Tile::kRowTiles > 1 ? rank * Tile::BLOCK_M : first) + row() + 8 * i;
  }
  // The lane's first two columns of row `i` in a slot; it has two of every eight columns.
  __device__ __forceinline__ float2* part(int slot, int i) const {
    const int column = half * kColumns + lane_index() % 4 * 2;
    return reinterpret_cast<float2*>(partials.values(slot, part_row(i), column));
  }
  __device__ __forceinline__ float2* stored_stats(int slot, int i) const {
    return partials.row_stats(slot, part_row(i));
  }

  // Whether partial results lack the lane's row `i`.
  __device__ __forceinline__ bool is_padding(int i, const Segment& segment) const {
    return first + row() + 8 * i >= segment.num_rows;
  }

  __device__ __forceinline__ void store_part(const float (&accumulators)[kColumns / 2],
                                             const RowStats<2>& stats, const Segment& segment,
                                             int slot) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (!Tile::kPadsParts) {
        if (is_padding(i, segment)) continue;
      }
      float2* pairs = part(slot, i);
#pragma unroll
      for (int step = 0; step < kColumns / 8; ++step) {
        const int at = 4 * step + 2 * i;
        __stcg(pairs + 4 * step, {accumulators[at], accumulators[at + 1]});
      }
      // Both halves store the statistics: a thread block that merges waits only for parts of its
      // own half.
      if (lane_index() % 4 == 0) {
        __stcg(stored_stats(slot, i), {stats.row_max[i], stats.row_sum[i]});
      }
    }
  }

  // Adds up all parts in the order of the teams.
  __device__ __forceinline__ void merge(const Segment& segment) const {
    constexpr int kInFlight = 16;
    float accumulators[kColumns / 2] = {};
    RowStats<2> stats;
#pragma unroll 1
    for (int part_team = segment.first_team; part_team <= segment.last_team; ++part_team) {
      const int slot = PartialResults<kTileRows>::slot(part_team, part_team == segment.first_team);
      RowStats<2> part_stats;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (!Tile::kPadsParts) {
          if (is_padding(i, segment)) continue;
        }
        const float2 stored = __ldcg(stored_stats(slot, i));
        part_stats.row_max[i] = stored.x, part_stats.row_sum[i] = stored.y;
      }
      const RescaleFactors<2> factors = add(stats, part_stats);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (!Tile::kPadsParts) {
          if (is_padding(i, segment)) continue;
        }
        const float2* pairs = part(slot, i);
#pragma unroll
        for (int first = 0; first < kColumns / 8; first += kInFlight) {
          float2 found[kInFlight];
#pragma unroll
          for (int j = 0; j < kInFlight; ++j) found[j] = __ldcg(pairs + 4 * (first + j));
#pragma unroll
          for (int j = 0; j < kInFlight; ++j) {
            float* pair = accumulators + 4 * (first + j) + 2 * i;
            pair[0] = pair[0] * factors.sum[i] + found[j].x * factors.part[i];
            pair[1] = pair[1] * factors.sum[i] + found[j].y * factors.part[i];
          }
        }
      }
    }
    store(accumulators, stats, segment);
  }
};

}  // namespace kernelcat
