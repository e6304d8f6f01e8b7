// Shapes and shared memory of flashmla/pair.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma.cuh>

#include "latent.cuh"
#include "segments.cuh"

namespace kernelcat {

template <typename A, typename B>
constexpr bool kSameType = false;
template <typename A>
constexpr bool kSameType<A, A> = true;

// A cluster of two thread blocks has 128 rows, or 64 (kWarpgroups = 1): then the first thread block
// computes the softmax of all. The cluster takes 64 tokens at a time.
template <typename T_, typename Cached_, int kPageSize_, int kWarpgroups_>
struct PairTile {
  using T = T_;
  using Cached = Cached_;
  // The producer warpgroup converts float8 rows to 16 bits in shared memory.
  static constexpr bool kPacked = !kSameType<T, Cached>;
  static constexpr int kWarpgroups = kWarpgroups_, kWarpgroupRows = kWgmmaM;
  static constexpr int BLOCK_M = kWarpgroups * kWarpgroupRows, BLOCK_N = 64;
  static constexpr int kPageSize = kPageSize_, kRowTiles = 1;
  static constexpr int kTeamBlocks = 2;  // the cluster
  static constexpr int kNumStages = 3;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kNumThreads = 3 * kWarpgroupThreads;  // the last warpgroup loads
  static constexpr int kNumWarps = kNumThreads / kWarpThreads;
  static constexpr int kProducerRegisters = kPacked ? 72 : 40;
  static constexpr int kConsumerRegisters = kPacked ? 216 : 232;
  static constexpr int kColumns = kRowBytes / 2;                         // of a chunk
  static constexpr int kValueChunks = kLatent / kTeamBlocks / kColumns;  // of half of the columns
  static constexpr int kRopeChunk = kValueChunks, kChunks = kValueChunks + 1;
  static constexpr int kChunkBytes = BLOCK_N * kRowBytes;
  static constexpr int kBoxTokens = BLOCK_N < kPageSize ? BLOCK_N : kPageSize;
  static constexpr int kBoxes = BLOCK_N / kBoxTokens;  // of a chunk: each lies within a page
  static constexpr bool kPadsParts = true;             // as LatentTile's
  using List = WorkList<BLOCK_M, BLOCK_N>;
  static_assert(kChunks * kBoxes <= kWarpThreads, "a lane loads a box");
};

// Warpgroup w has rows 64 * w ..; the thread block of rank w computes their softmax.
template <typename Tile>
struct PairShared {
  static constexpr int kThreads = kWarpgroupThreads;
  alignas(1024) uint8_t queries[2][Tile::kValueChunks][Tile::kChunkBytes];
  // The rotated part of the rows whose softmax is computed here.
  alignas(1024) uint8_t queries_rope[Tile::kChunkBytes];
  alignas(1024) uint8_t keys[Tile::kNumStages][Tile::kChunks][Tile::kChunkBytes];
  // What the peer sends, each thread to the same thread of its warpgroup: what its columns add to
  // scores of the rows whose softmax is computed here; weights, row max and row sum of the other
  // rows.
  float4 scores[Tile::BLOCK_N / 8][kThreads];
  uint4 weights[Tile::BLOCK_N / 16][kThreads];
  float4 stats[kThreads];                                              // row_max[2], row_sum[2]
  float4 scales[Tile::kPacked ? Tile::kNumStages : 1][Tile::BLOCK_N];  // of packed rows
  Barrier queries_full, queries_empty, consumers;
  Barrier keys_full[Tile::kNumStages], keys_empty[Tile::kNumStages];
  Barrier packed_full[Tile::kPacked ? Tile::kNumStages : 1];  // packed rows have landed
  Barrier scores_full, weights_full;
  Barrier scores_empty, weights_empty;  // the peer has read what was sent
  Planner<typename Tile::List, Tile::kNumWarps> planner;
  Segment segments[2];  // by turns; queries_full says that one is complete
  bool is_last;
};

}  // namespace kernelcat
