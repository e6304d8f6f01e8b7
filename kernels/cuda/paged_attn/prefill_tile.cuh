// What the thread blocks of paged_attn/wgmma work on: row tiles, their shared memory, and the order
// in which row tiles are taken.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/sequences.cuh>
#include <kernelcat/wgmma.cuh>

#include "attention.cuh"

namespace kernelcat {

__host__ __device__ constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

// BLOCK_M rows, 64 for each consumer warpgroup, against BLOCK_N tokens at a time. Rows are query
// tokens, with the heads that share a key-value head side by side; a row tile has whole query
// tokens only. The thread blocks of a cluster take neighbouring row tiles, and each loads a part of
// the keys and values for all.
template <typename Kind_, int BLOCK_M_, int BLOCK_N_, int kNumStages_, int kClusterSize_>
struct PrefillTile {
  using Kind = Kind_;
  using T = typename Kind::T;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int kHeadDim = Kind::kHeadDim, kPageSize = Kind::kPageSize;
  static constexpr int kNumConsumers = BLOCK_M / kWgmmaM;  // warpgroups
  static constexpr int kConsumerThreads = kNumConsumers * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / kWarpThreads;
  static constexpr int kNumThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kProducerRegisters = kNumConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kNumConsumers == 2 ? 240 : 160;
  static constexpr int kChunkColumns = kRowBytes / 2;  // of 128 bytes
  static constexpr int kChunks = kHeadDim / kChunkColumns;
  static constexpr int kTileBytes = BLOCK_N * kHeadDim * 2;
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kLoadedTokens = BLOCK_N / kClusterSize;  // of a KV tile, by a thread block
  // A box of a tensor map lies within a page.
  static constexpr int kBoxTokens = greatest_common_divisor(kLoadedTokens, kPageSize);
  static constexpr int kBoxes = kLoadedTokens / kBoxTokens;
  static_assert(kBoxTokens % 8 == 0);
  static_assert(kBoxes <= kWarpThreads && kNumStages >= 2);
};

// wgmma.cu has a table of the barriers.
template <typename Tile>
struct PrefillShared {
  static constexpr int kChunks = Tile::kChunks, kNumStages = Tile::kNumStages;
  alignas(1024) uint8_t queries[kChunks][Tile::BLOCK_M * kRowBytes];
  alignas(1024) uint8_t keys[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  alignas(1024) uint8_t values[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  float unread[Tile::kConsumerThreads];  // written, never read: see complete_softmax()
  Barrier queries_full, queries_empty;
  Barrier keys_full[kNumStages], keys_empty[kNumStages];
  Barrier values_full[kNumStages], values_empty[kNumStages];
};

// A thread block's rows, and the KV tiles [begin, end) that some row of the cluster sees: at least
// one, because every row must be written.
struct RowTile {
  Sequence sequence;
  int sequence_idx, kv_head;
  int first_query, num_queries;  // of the sequence; num_queries <= 0: no rows
  int begin, end;

  // The last tokens that the first and the last query token of the tile see.
  __device__ __forceinline__ int first_query_limit() const {
    return sequence.context() + first_query;
  }
  __device__ __forceinline__ int last_query_limit() const {
    return first_query_limit() + num_queries - 1;
  }
};

// Divides the row tiles among the clusters, which all take equally many, give or take one. Those
// that see the most tokens come first, and clusters take them back and forth, so that all clusters
// have about as many KV tiles. The order is made on the device because a captured graph may be
// replayed with other lengths.
template <typename Tile>
struct PrefillSchedule {
  const int* kv_lens;  // (batch,)
  const int* cu_q;     // (batch + 1,)
  int batch, kv_heads, group, window;
  int num_row_tiles;  // of any sequence and head at most, for a thread block of the cluster
  int rank;           // of the thread block in its cluster

  __device__ __forceinline__ int tokens_per_tile() const { return Tile::BLOCK_M / group; }

  // Calls `function(row_tile)` for each row tile of the thread block.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const int pairs = batch * kv_heads, num_tiles = num_row_tiles * pairs;
    const int num_clusters = static_cast<int>(gridDim.x) / Tile::kClusterSize;
    int place = static_cast<int>(blockIdx.x) / Tile::kClusterSize;
    for (int first = 0; first < num_tiles; first += num_clusters) {
      if (first + place < num_tiles) {
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
  // False if the sequence has no such row tile.
  __device__ __forceinline__ bool find(RowTile& tile, int row_tile, int sequence_idx,
                                       int kv_head) const {
    const int step = tokens_per_tile(), cluster_step = Tile::kClusterSize * step;
    const int begin = __ldg(cu_q + sequence_idx), first = row_tile * cluster_step;
    const int num_queries = __ldg(cu_q + sequence_idx + 1) - begin;
    if (first >= num_queries) return false;
    tile.sequence = {.first_query = begin,
                     .num_queries = num_queries,
                     .num_tokens = __ldg(kv_lens + sequence_idx)};
    tile.sequence_idx = sequence_idx, tile.kv_head = kv_head;
    tile.first_query = first + rank * step;
    tile.num_queries = min(step, num_queries - tile.first_query);
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
