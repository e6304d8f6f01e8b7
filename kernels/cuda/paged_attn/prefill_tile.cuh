// Prefill's tiles: their shapes, their shared memory, and the order in which they are worked off.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma.cuh>

#include "attention.cuh"
#include "schedule.cuh"

namespace kernelcat {

__host__ __device__ constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

// BLOCK_M rows, 64 for each consumer warpgroup, against BLOCK_N tokens at a time. Rows are query
// tokens and the heads that share a key-value head; a tile has whole tokens only. The blocks of a
// cluster have neighbouring rows, and each loads its part of the keys and values for all.
template <typename Kind_, int BLOCK_M_, int BLOCK_N_, int kNumStages_, int kClusterSize_>
struct PrefillTile {
  using Kind = Kind_;
  using T = typename Kind::T;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int kHeadDim = Kind::kHeadDim, kPageSize = Kind::kPageSize;
  static constexpr int kNumConsumers = BLOCK_M / kWgmmaM;
  static constexpr int kConsumerThreads = kNumConsumers * kWarpgroupThreads;
  static constexpr int kNumThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kProducerRegisters = kNumConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kNumConsumers == 2 ? 240 : 160;
  static constexpr int kColumns = kRowBytes / 2;  // of a chunk
  static constexpr int kChunks = kHeadDim / kColumns;
  static constexpr int kTileBytes = BLOCK_N * kHeadDim * 2;
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kLoadedTokens = BLOCK_N / kClusterSize;  // of a tile, by each block
  // A box of a tensor map lies within a page.
  static constexpr int kBoxTokens = greatest_common_divisor(kLoadedTokens, kPageSize);
  static constexpr int kBoxes = kLoadedTokens / kBoxTokens;
  static_assert(kBoxTokens % 8 == 0);
  static_assert(kBoxes <= kWarpThreads && kNumStages >= 2);
};

template <typename Tile>
struct PrefillShared {
  static constexpr int kChunks = Tile::kChunks, kNumStages = Tile::kNumStages;
  alignas(1024) uint8_t queries[kChunks][Tile::BLOCK_M * kRowBytes];
  alignas(1024) uint8_t keys[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  alignas(1024) uint8_t values[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  float totals[Tile::kConsumerThreads];  // written, never read: see keep_before()
  Barrier queries_full, queries_empty;
  Barrier keys_full[kNumStages], keys_empty[kNumStages];
  Barrier values_full[kNumStages], values_empty[kNumStages];
};

// Rows of a block, and the tiles of tokens [begin, end) that some row of the cluster sees: at least
// one, so that every row is written.
struct RowTile {
  Sequence sequence;
  int index;  // of the sequence
  int kv_head;
  int first, size;  // query tokens of the sequence; none if size <= 0
  int begin, end;

  // The last tokens that the first and the last of the rows see.
  __device__ __forceinline__ int first_limit() const { return sequence.context() + first; }
  __device__ __forceinline__ int last_limit() const { return first_limit() + size - 1; }
};

// Every cluster takes the same number of row tiles, give or take one: those that see most first,
// and back and forth, so that the sums of what they see are alike. Made on the device, from lengths
// that a captured graph may find changed.
template <typename Tile>
struct PrefillSchedule {
  const int *kv_lens, *cu_q;
  int batch, kv_heads, group, window;
  int num_row_tiles;  // of any sequence and one of the cluster's blocks, at most
  int rank;           // of the block in its cluster

  __device__ __forceinline__ int tokens_per_tile() const { return Tile::BLOCK_M / group; }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const int pairs = batch * kv_heads, total = num_row_tiles * pairs;
    const int num_clusters = static_cast<int>(gridDim.x) / Tile::kClusterSize;
    int place = static_cast<int>(blockIdx.x) / Tile::kClusterSize;
    for (int first = 0; first < total; first += num_clusters) {
      if (first + place < total) {
        const int i = first + place, pair = i % pairs;
        RowTile tile;
        if (find(tile, num_row_tiles - 1 - i / pairs, pair / kv_heads, pair % kv_heads)) {
          function(tile);
        }
      }
      place = num_clusters - 1 - place;
    }
  }

 private:
  // False if the sequence has no such tile.
  __device__ __forceinline__ bool find(RowTile& tile, int row_tile, int s, int kv_head) const {
    const int step = tokens_per_tile(), cluster_step = Tile::kClusterSize * step;
    const int begin = __ldg(cu_q + s), first = row_tile * cluster_step;
    const int num_queries = __ldg(cu_q + s + 1) - begin;
    if (first >= num_queries) return false;
    tile.sequence = {begin, num_queries, __ldg(kv_lens + s)};
    tile.index = s, tile.kv_head = kv_head, tile.first = first + rank * step;
    tile.size = min(step, num_queries - tile.first);
    // What some row of the cluster sees.
    const int context = tile.sequence.context();
    const int first_token = Tile::Kind::kWindow ? max(context + first + 1 - window, 0) : 0;
    const int end_token = context + min(first + cluster_step, num_queries);
    tile.begin = first_token / Tile::BLOCK_N;
    tile.end = max(ceil_div(max(end_token, 0), Tile::BLOCK_N), tile.begin + 1);
    return true;
  }
};

}  // namespace kernelcat
