// What the thread blocks of paged_attn/wgmma work on: row tiles and their shared memory.
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

// A thread block's rows, and the KV tiles [begin, end) that some row of the cluster sees: at least
// one, because every row must be written.
struct RowTile {
  Sequence sequence;
  int sequence_idx = 0, kv_head = 0;
  int first_query = 0, num_queries = 0;  // of the sequence; num_queries <= 0: no rows
  int begin = 0, end = 0;

  // No row tile: it has no KV tile.
  static __device__ __forceinline__ RowTile none() { return {}; }
  __device__ __forceinline__ bool exists() const { return begin < end; }

  // The last tokens that the first and the last query token of the tile see.
  __device__ __forceinline__ int first_query_limit() const {
    return sequence.context() + first_query;
  }
  __device__ __forceinline__ int last_query_limit() const {
    return first_query_limit() + num_queries - 1;
  }
};

// wgmma.cu has a table of the barriers.
template <typename Tile>
struct PrefillShared {
  static constexpr int kChunks = Tile::kChunks, kNumStages = Tile::kNumStages;
  alignas(1024) uint8_t queries[kChunks][Tile::BLOCK_M * kRowBytes];
  alignas(1024) uint8_t keys[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  alignas(1024) uint8_t values[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  RowTile row_tiles[2];                  // of the queries, by the phase of queries_full
  float unread[Tile::kConsumerThreads];  // written, never read: see complete_softmax()
  Barrier queries_full, queries_empty;
  Barrier keys_full[kNumStages], keys_empty[kNumStages];
  Barrier values_full[kNumStages], values_empty[kNumStages];
};

}  // namespace kernelcat
