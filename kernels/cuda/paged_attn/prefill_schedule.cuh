// The order in which the clusters of paged_attn/wgmma take row tiles.
#pragma once

#include <kernelcat/sync.cuh>

#include "prefill_tile.cuh"

namespace kernelcat {

// Divides the row tiles among the clusters, which all take equally many, give or take one. Those
// that see the most tokens come first, and clusters take them back and forth, so that all clusters
// have about as many KV tiles, whatever the lengths. The order is made on the device because a
// captured graph may be replayed with other lengths.
//
// A row tile's level is the number of row tiles that its sequence would have up to it if all tokens
// of the sequence were queries. So a sequence has row tiles at some successive levels, and those of
// a greater level see more tokens. A warp goes down the levels run by run: in a run the same
// sequences have a row tile at every level, and row tile n of the run is found by division. Each
// lane keeps one sequence; more than 32 sequences are divided into groups of 32, one group after
// the other. (A warp that finds the next tile of uneven sequences: the scheduler of
// FlashAttention-3.)
//
// All functions are called by whole warps.
template <typename Tile>
class PrefillSchedule {
 public:
  __device__ __forceinline__ PrefillSchedule(const int* kv_lens, const int* cu_q, int batch,
                                             int kv_heads, int group, int window, int rank)
      : kv_lens_(kv_lens),
        cu_q_(cu_q),
        batch_(batch),
        kv_heads_(kv_heads),
        window_(window),
        rank_(rank),
        queries_(Tile::BLOCK_M / group),
        place_(static_cast<int>(blockIdx.x) / Tile::kClusterSize),
        ahead_(place_) {}

  // The thread block's next row tile; false if none is left.
  __device__ __forceinline__ bool next(RowTile& tile) {
    int level_tiles = 0;  // row tiles of a level of the run
    while (true) {
      level_tiles = __popc(sequences_) * kv_heads_;
      const int run_tiles = (top_ - bottom_) * level_tiles;
      if (ahead_ < run_tiles) break;
      ahead_ -= run_tiles;
      if (!find_run()) return false;
    }
    const int level = top_ - 1 - ahead_ / level_tiles, pair = ahead_ % level_tiles;
    find_row_tile(tile, level, lane_of_nth(pair / kv_heads_), pair % kv_heads_);
    // One round of the clusters goes up, the next one down.
    const int clusters = static_cast<int>(gridDim.x) / Tile::kClusterSize;
    const int next_place = clusters - 1 - place_;
    ahead_ += clusters - place_ + next_place;
    place_ = next_place;
    return true;
  }

 private:
  static constexpr int kAllLevels = 0x7fffffff;

  struct Levels {
    int begin = 0, end = 0;
  };

  __device__ __forceinline__ int cluster_queries() const { return Tile::kClusterSize * queries_; }

  __device__ __forceinline__ int first_level(const Sequence& sequence) const {
    return max(sequence.context(), 0) / cluster_queries();
  }

  __device__ __forceinline__ Levels levels_of(const Sequence& sequence) const {
    const int begin = first_level(sequence);
    return {begin, begin + ceil_div(sequence.num_queries, cluster_queries())};
  }

  // Goes to the run below, or to the first one of the next sequences; false if none is left.
  __device__ __forceinline__ bool find_run() {
    for (; first_sequence_ < batch_; first_sequence_ += kWarpThreads) {
      if (bottom_ == kAllLevels) load_own_sequence();
      const Levels levels = levels_of(own_sequence_);
      const int end = min(levels.end, bottom_);
      top_ = __reduce_max_sync(0xffffffff, levels.begin < end ? end : 0);
      if (top_ > 0) {
        sequences_ = __ballot_sync(0xffffffff, levels.begin < top_ && top_ <= levels.end);
        const int border = levels.end < top_ ? levels.end : levels.begin < top_ ? levels.begin : 0;
        bottom_ = __reduce_max_sync(0xffffffff, border);
        return true;
      }
      bottom_ = kAllLevels;
    }
    return false;
  }

  __device__ __forceinline__ void load_own_sequence() {
    const int index = first_sequence_ + lane_index();
    own_sequence_ = {};
    if (index < batch_) own_sequence_ = load_sequence(cu_q_, kv_lens_, index);
  }

  // The lane that looks at sequence n of those of the run.
  __device__ __forceinline__ int lane_of_nth(int n) const {
    const uint32_t lane_bit = 1u << lane_index();
    const bool is_nth = (sequences_ & lane_bit) != 0 && __popc(sequences_ & (lane_bit - 1)) == n;
    return __ffs(__ballot_sync(0xffffffff, is_nth)) - 1;
  }

  __device__ __forceinline__ Sequence sequence_of_lane(int lane) const {
    return {.first_query = __shfl_sync(0xffffffff, own_sequence_.first_query, lane),
            .num_queries = __shfl_sync(0xffffffff, own_sequence_.num_queries, lane),
            .num_tokens = __shfl_sync(0xffffffff, own_sequence_.num_tokens, lane)};
  }

  __device__ __forceinline__ void find_row_tile(RowTile& tile, int level, int lane,
                                                int kv_head) const {
    const Sequence sequence = sequence_of_lane(lane);
    const int first = (level - first_level(sequence)) * cluster_queries();
    tile.sequence = sequence;
    tile.sequence_idx = first_sequence_ + lane, tile.kv_head = kv_head;
    tile.first_query = first + rank_ * queries_;
    tile.num_queries = min(queries_, sequence.num_queries - tile.first_query);
    // What some row of the cluster sees.
    const int context = sequence.context();
    const int first_token = Tile::Kind::kWindow ? max(context + first + 1 - window_, 0) : 0;
    const int end_token = context + min(first + cluster_queries(), sequence.num_queries);
    tile.begin = first_token / Tile::BLOCK_N;
    tile.end = max(ceil_div(max(end_token, 0), Tile::BLOCK_N), tile.begin + 1);
  }

  const int* kv_lens_;  // (batch,)
  const int* cu_q_;     // (batch + 1,)
  const int batch_, kv_heads_, window_;
  const int rank_;     // of the thread block in its cluster
  const int queries_;  // of a thread block's row tile
  int place_;          // of the cluster in the round
  int ahead_;          // row tiles from the run's first one to the cluster's next one
  int first_sequence_ = 0;
  Sequence own_sequence_;  // first_sequence_ + lane_index(); without queries if there is none
  int top_ = kAllLevels, bottom_ = kAllLevels;  // the run's levels are [bottom_, top_)
  uint32_t sequences_ = 0;                      // bit i: sequence first_sequence_ + i is in the run
};

}  // namespace kernelcat
